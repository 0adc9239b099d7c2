// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"encoding/binary"
	"net/netip"

	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/spin"
)

// A reply says to whom an answer goes. It has the buffers of two: the answer to the
// HER's segment, and the one to the segment with EOM.
type reply struct {
	to       peer
	buf, own [256]byte
}

// say makes an answer, in one of the runner's buffers.
func (r *runner) say(ms *messages, a spin.AckRequest, processed bool, e *mpq.Entry) []byte {
	return ms.say(r.reply.buf[:0], a, processed, e)
}

func (ms *messages) say(buf []byte, a spin.AckRequest, processed bool, e *mpq.Entry) []byte {
	if ms.cfg.Protocol == nil {
		return nil
	}
	return ms.cfg.Protocol.Answer(buf, a, processed, e)
}

// answer sends an answer, in the packet's own frame if nobody needs that any more.
// Without room it is not sent: what is asked again is answered again.
func (r *runner) answer(to *peer, b []byte) {
	req := &r.her
	if len(b) == 0 || to.n == 0 {
		return
	}
	if req.action != recycle || len(req.all) == 0 {
		r.answerNew(to, b)
		return
	}
	frame := r.pool.cfg.Memory.Bytes(req.all[0].Addr, max(int(to.n)+len(b), minFrame))
	if frame == nil || !r.batch.reserve(1) {
		req.acc.AckFull++
		return
	}
	copy(frame[to.n:], b)
	req.all[0].Len = uint32(to.finish(frame, len(b)))
	req.all[0].Options = 0
	req.segs = req.all[:1]
	req.action = send
	req.acc.Acks++
	req.acked++
}

// answerNew sends an answer in a frame of its own.
func (r *runner) answerNew(to *peer, b []byte) {
	req := &r.her
	if len(b) == 0 || to.n == 0 {
		return
	}
	full := req.acc.SendFull
	frame, err := req.SendNew(max(int(to.n)+len(b), minFrame))
	if err != nil {
		req.acc.SendFull = full
		req.acc.AckFull++
		return
	}
	copy(frame[to.n:], b)
	to.finish(frame, len(b))
	req.acc.Acks++
	req.acked++
}

// A peer is how to reach the sender of a message: the headers of a frame to it.
type peer struct {
	n   uint8 // bytes; 0: no way to answer
	hdr [14 + 40 + 8]byte
}

// learn makes the headers of frames back to where one comes from.
func (p *peer) learn(head []byte) {
	p.n = 0
	if len(head) < 14+20+8 {
		return
	}
	h := p.hdr[:]
	copy(h, head[6:12])
	copy(h[6:], head[:6])
	copy(h[12:14], head[12:14])
	var at int
	switch binary.BigEndian.Uint16(head[12:]) {
	case 0x0800:
		ip := head[14:]
		ihl := int(ip[0]&15) * 4
		if ip[0]>>4 != 4 || ip[9] != protocolUDP || ihl < 20 || len(ip) < ihl+8 {
			return
		}
		clear(h[14:34])
		h[14] = 0x45
		h[20] = 0x40 // don't fragment
		h[22] = ttl
		h[23] = protocolUDP
		copy(h[26:30], ip[16:20])
		copy(h[30:34], ip[12:16])
		at, head = 34, ip[ihl:]
	case 0x86dd:
		ip := head[14:]
		if len(ip) < 48 || ip[0]>>4 != 6 || ip[6] != protocolUDP {
			return
		}
		clear(h[14:22])
		h[14] = 0x60
		h[20] = protocolUDP
		h[21] = ttl
		copy(h[22:38], ip[24:40])
		copy(h[38:54], ip[8:24])
		at, head = 54, ip[40:]
	default:
		return
	}
	copy(h[at:], head[2:4])
	copy(h[at+2:], head[:2])
	p.n = uint8(at + 8)
}

const (
	protocolUDP = 17
	ttl         = 64
	// minFrame is Ethernet's, without its checksum.
	minFrame = 60
)

func (p *peer) addr() netip.AddrPort {
	var a netip.Addr
	switch p.n {
	case 42:
		a = netip.AddrFrom4([4]byte(p.hdr[30:34]))
	case 62:
		a = netip.AddrFrom16([16]byte(p.hdr[38:54]))
	default:
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(p.hdr[p.n-6:]))
}

// finish writes a frame's headers, over a payload of n bytes that is there
// already, and returns how long the frame is. Short frames are padded with zeros.
//
// The UDP checksum is a real one, unlike FPsPIN's, which is 0 for none: a bit that
// flips in an acknowledgement would acknowledge something else.
func (p *peer) finish(frame []byte, n int) int {
	copy(frame, p.hdr[:p.n])
	udp := frame[p.n-8 : int(p.n)+n]
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	binary.BigEndian.PutUint16(udp[6:], 0)
	if p.n == 42 {
		ip := frame[14:34]
		binary.BigEndian.PutUint16(ip[2:], uint16(20+len(udp)))
		binary.BigEndian.PutUint16(ip[10:], 0)
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	} else {
		binary.BigEndian.PutUint16(frame[18:], uint16(len(udp)))
	}
	sum := udpSum(frame[:p.n-8], udp)
	v := ^sum.Folded()
	if v == 0 {
		v = 0xffff
	}
	binary.BigEndian.PutUint16(udp[6:], v)
	size := int(p.n) + n
	if size < minFrame {
		clear(frame[size:minFrame])
		size = minFrame
	}
	return size
}
