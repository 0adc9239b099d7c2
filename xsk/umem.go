// SPDX-License-Identifier: Apache-2.0

package xsk

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// PacketHeadroom is what the kernel keeps free at the start of every received
// frame, in bytes and before UMEMConfig.Headroom. Metadata lies at its end.
const PacketHeadroom = unix.XDP_PACKET_HEADROOM

// UMEMConfig says how the memory of a UMEM is divided. All sizes are in bytes.
type UMEMConfig struct {
	Frames    int // number of frames
	FrameSize int // 2048 or 4096
	// Headroom is kept free in front of received data, after PacketHeadroom.
	// Optional; FrameSize-PacketHeadroom-Headroom bytes remain for the data.
	Headroom int
}

// UMEM is the memory that frames live in, mapped into this process and, while
// sockets are open on it, pinned by the kernel.
//
// Its accessors may be used by all goroutines at once, except during Close.
type UMEM struct {
	cfg    UMEMConfig
	mem    []byte
	shift  uint            // log2 of the frame size
	owners []atomic.Uint32 // one owner per frame; nil unless raceEnabled

	// mu guards what follows and the set of sockets of every queue: opening and
	// closing take it, the data path does not. It is taken before Queue.mu.
	mu     sync.Mutex
	queues []*Queue // with at least one open socket each
	serial uint32   // of the last queue opened
	closed bool
}

// NewUMEM maps the memory. The first socket opened on it registers it.
func NewUMEM(cfg UMEMConfig) (*UMEM, error) {
	switch {
	case cfg.FrameSize != 2048 && cfg.FrameSize != 4096:
		return nil, fmt.Errorf("xsk: frame size %d: want 2048 or 4096: %w", cfg.FrameSize, ErrConfig)
	case cfg.Frames <= 0 || cfg.Frames > 1<<24:
		return nil, fmt.Errorf("xsk: %d frames: want 1 to %d: %w", cfg.Frames, 1<<24, ErrConfig)
	case cfg.Headroom < 0 || cfg.Headroom >= cfg.FrameSize-PacketHeadroom:
		return nil, fmt.Errorf("xsk: headroom %d: want 0 to %d (frame size %d less the kernel's %d): %w",
			cfg.Headroom, cfg.FrameSize-PacketHeadroom-1, cfg.FrameSize, PacketHeadroom, ErrConfig)
	}
	size := cfg.Frames * cfg.FrameSize
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("xsk: map UMEM of %d frames, %d bytes: %w", cfg.Frames, size, err)
	}
	u := &UMEM{cfg: cfg, mem: mem, shift: uint(bits.TrailingZeros(uint(cfg.FrameSize)))}
	if raceEnabled {
		u.owners = make([]atomic.Uint32, cfg.Frames)
	}
	return u, nil
}

// Config returns what the UMEM was made with.
func (u *UMEM) Config() UMEMConfig { return u.cfg }

// Frame returns the number of the frame that addr lies in. It does not check addr:
// one outside the UMEM gives a number beyond its frames.
func (u *UMEM) Frame(addr uint64) int { return int(addr >> u.shift) }

// Addr returns the address of the first byte of a frame.
func (u *UMEM) Addr(frame int) uint64 { return uint64(frame) << u.shift }

// Bytes returns the n bytes at addr, or nil if they are not all inside one frame
// of an open UMEM. The slice is valid while the caller owns the frame, and unmapped
// memory once the UMEM is closed.
func (u *UMEM) Bytes(addr uint64, n int) []byte {
	off := addr & (1<<u.shift - 1)
	if addr >= uint64(len(u.mem)) || uint64(n) > 1<<u.shift-off {
		return nil
	}
	return u.mem[addr : addr+uint64(n) : addr+uint64(n)]
}

// Front returns the n bytes before addr, where XDP programs leave metadata, or
// nil if they are not in the same frame as the byte at addr. The slice is valid as
// that of Bytes.
func (u *UMEM) Front(addr uint64, n int) []byte {
	if uint64(n) > addr&(1<<u.shift-1) {
		return nil
	}
	return u.Bytes(addr-uint64(n), n)
}

// Close unmaps the memory. It returns ErrInUse, and does nothing, while sockets
// are open on it, and nil if it was closed before.
func (u *UMEM) Close() error {
	if u == nil {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed {
		return nil
	}
	if n := len(u.queues); n > 0 {
		return fmt.Errorf("xsk: close UMEM: sockets on %d queues are open, close them first: %w", n, ErrInUse)
	}
	u.closed = true
	mem := u.mem
	u.mem = nil
	if err := unix.Munmap(mem); err != nil {
		return fmt.Errorf("xsk: unmap UMEM of %d bytes: %w", len(mem), err)
	}
	return nil
}

// member returns an open socket of the UMEM, or nil. The caller holds u.mu.
func (u *UMEM) member() *Socket {
	if len(u.queues) == 0 {
		return nil
	}
	return u.queues[0].sockets[0]
}

// errUMEMClosed is the error of opening something on a closed UMEM.
var errUMEMClosed = fmt.Errorf("xsk: UMEM: %w", ErrClosed)
