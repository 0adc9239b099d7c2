// SPDX-License-Identifier: Apache-2.0

package xsk

import "fmt"

// An owner is who may touch a frame: this process, or the kernel, which got it
// through the fill or the transmit ring of a queue. Owners are recorded only if
// raceEnabled.
type owner uint32

const (
	ownerUser owner = 0
	viaFill   owner = 1
	viaTx     owner = 2
	viaBits         = 2
)

// kernel returns the owner of frames that the kernel got through a ring of q.
func (q *Queue) kernel(via owner) owner { return owner(q.serial)<<viaBits | via }

func (o owner) String() string {
	switch q := o >> viaBits; o & (1<<viaBits - 1) {
	case viaFill:
		return fmt.Sprintf("kernel (fill ring of queue #%d)", q)
	case viaTx:
		return fmt.Sprintf("kernel (transmit ring of queue #%d)", q)
	}
	return "user"
}

// give moves a frame from this process to the kernel. It panics if the frame
// does not exist or is not ours: that is the bug the race build looks for.
func (u *UMEM) give(addr uint64, to owner) {
	frame := u.Frame(addr)
	if frame >= len(u.owners) {
		panic(fmt.Sprintf("xsk: address %#x given to the %v is outside the UMEM of %d frames", addr, to, len(u.owners)))
	}
	if !u.owners[frame].CompareAndSwap(uint32(ownerUser), uint32(to)) {
		panic(fmt.Sprintf("xsk: frame %d (address %#x) given to the %v while owned by the %v",
			frame, addr, to, owner(u.owners[frame].Load())))
	}
}

// take moves a frame from the kernel to this process. Addresses outside the
// UMEM are let through: they are the kernel's fault, and Bytes refuses them.
func (u *UMEM) take(addr uint64, from owner) {
	frame := u.Frame(addr)
	if frame >= len(u.owners) {
		return
	}
	if !u.owners[frame].CompareAndSwap(uint32(from), uint32(ownerUser)) {
		panic(fmt.Sprintf("xsk: frame %d (address %#x) came from the %v while owned by the %v",
			frame, addr, from, owner(u.owners[frame].Load())))
	}
}

// reclaim gives this process all frames that the kernel owned through q.
func (u *UMEM) reclaim(q *Queue) {
	for i := range u.owners {
		u.owners[i].CompareAndSwap(uint32(q.kernel(viaFill)), uint32(ownerUser))
		u.owners[i].CompareAndSwap(uint32(q.kernel(viaTx)), uint32(ownerUser))
	}
}
