// SPDX-License-Identifier: Apache-2.0

package rtt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
)

func TestSum(t *testing.T) {
	for _, tc := range []struct {
		name string
		b    []byte
		want uint16
	}{
		{"the example of RFC 1071", []byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}, 0xddf2},
		{"nothing", nil, 0},
		{"one byte is the high half of a word", []byte{0xab}, 0xab00},
		{"all ones stay all ones", bytes.Repeat([]byte{0xff}, 1416), 0xffff},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := sum(tc.b); got != tc.want {
				t.Errorf("sum = %#04x, want %#04x", got, tc.want)
			}
		})
	}

	t.Run("any bytes sum up as word by word", func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(1, 1))
		for n := range 1500 {
			b := make([]byte, n)
			for i := range b {
				b[i] = byte(rnd.Uint32()) | byte(n) // with n = 255: long runs of carries
			}
			var want uint32
			for i, v := range b {
				want += uint32(v) << (8 * (1 - i%2))
				want = want>>16 + want&0xffff
			}
			if got := sum(b); uint32(got) != want {
				t.Fatalf("%d bytes: sum = %#04x, want %#04x", n, got, want)
			}
		}
	})
}

func TestJudge(t *testing.T) {
	const seq = 70000 // beyond 16 bits: the ICMP header has only the lower half
	reply := func(c *Client, seq uint32) []byte {
		c.compose(seq)
		b := bytes.Clone(c.tx)
		if c.o.Proto == UDP {
			return b
		}
		b[0] = icmpEchoReply
		return append([]byte{0x45, 19: 0}, checksummed(b)...)
	}
	flip := func(i int) func([]byte) []byte {
		return func(b []byte) []byte { b[(len(b)+i)%len(b)] ^= 1; return b }
	}
	for _, tc := range []struct {
		name   string
		proto  Proto
		seq    uint32 // of the ping that was answered
		damage func([]byte) []byte
		want   verdict
	}{
		{"a UDP reply as sent", UDP, seq, nil, answered},
		{"a UDP reply to the ping before", UDP, seq - 1, nil, late},
		{"a UDP reply to a ping not sent yet", UDP, seq + 1, nil, bad},
		{"a UDP reply with its first byte flipped", UDP, seq, flip(0), bad},
		{"a UDP reply of another run", UDP, seq, flip(7), bad},
		{"a UDP reply with its last byte flipped", UDP, seq, flip(-1), bad},
		{"a damaged UDP reply to the ping before", UDP, seq - 1, flip(-1), bad},
		{"a UDP reply one byte short", UDP, seq, func(b []byte) []byte { return b[:len(b)-1] }, bad},
		{"a UDP reply one byte long", UDP, seq, func(b []byte) []byte { return append(b, 0) }, bad},
		{"an empty UDP reply", UDP, seq, func(b []byte) []byte { return nil }, bad},
		{"the contents of one ping under the number of another", UDP, seq - 1,
			func(b []byte) []byte { binary.BigEndian.PutUint32(b, seq); return b }, bad},

		{"an ICMP reply as sent", ICMP, seq, nil, answered},
		{"an ICMP reply to the ping before", ICMP, seq - 1, nil, late},
		{"an ICMP reply to the ping with the same 16 bits", ICMP, seq - 65536, nil, late},
		{"an ICMP reply behind IP options", ICMP, seq,
			func(b []byte) []byte { return append([]byte{0x46, 23: 0}, b[20:]...) }, answered},
		{"an ICMP reply with its last byte flipped", ICMP, seq, flip(-1), bad},
		{"an ICMP reply with its last byte flipped and the checksum made to fit", ICMP, seq,
			func(b []byte) []byte { b[len(b)-1] ^= 1; checksummed(b[20:]); return b }, bad},
		{"an ICMP reply with a wrong checksum", ICMP, seq, flip(22), bad},
		{"an ICMP reply with a code", ICMP, seq, func(b []byte) []byte { b[21] = 1; checksummed(b[20:]); return b }, bad},
		{"an ICMP reply whose header has another sequence number than its payload", ICMP, seq,
			func(b []byte) []byte { b[27] ^= 1; checksummed(b[20:]); return b }, bad},
		{"an ICMP reply one byte short", ICMP, seq,
			func(b []byte) []byte { b = b[:len(b)-1]; checksummed(b[20:]); return b }, bad},
		{"an ICMP reply without payload", ICMP, seq,
			func(b []byte) []byte { b = b[:28]; checksummed(b[20:]); return b }, bad},
		{"an ICMP reply to another program", ICMP, seq, flip(25), foreign},
		{"an ICMP message that is no echo reply", ICMP, seq,
			func(b []byte) []byte { b[20] = 3; checksummed(b[20:]); return b }, foreign},
		{"an ICMP header cut short", ICMP, seq, func(b []byte) []byte { return b[:27] }, foreign},
		{"an IP header cut short", ICMP, seq, func(b []byte) []byte { return b[:19] }, foreign},
		{"nothing at all", ICMP, seq, func(b []byte) []byte { return nil }, foreign},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, size := range []int{MinSize + 1, 16, 1416} {
				c := client(tc.proto, size)
				b := reply(c, tc.seq)
				if tc.damage != nil {
					b = tc.damage(b)
				}
				if got := c.judge(b, seq); got != tc.want {
					t.Errorf("%d bytes: verdict %d, want %d", size, got, tc.want)
				}
			}
		})
	}
}

// checksummed puts the right checksum into an ICMP message.
func checksummed(b []byte) []byte {
	b[2], b[3] = 0, 0
	binary.BigEndian.PutUint16(b[2:], ^sum(b))
	return b
}

func client(p Proto, size int) *Client {
	c := &Client{o: Options{Proto: p, Size: size}, id: 0x12345678, pattern: make([]byte, size+shifts)}
	if p == ICMP {
		c.head = icmpHeader
	}
	c.tx = make([]byte, c.head+size)
	fill(c.pattern, c.id)
	return c
}

func TestOptions(t *testing.T) {
	good := Options{Proto: UDP, Remote: netip.MustParseAddrPort("127.0.0.1:9"), Size: 16, Count: 1, CPU: -1}
	for _, tc := range []struct {
		name   string
		change func(*Options)
		ok     bool
	}{
		{"defaults", func(*Options) {}, true},
		{"the smallest payload", func(o *Options) { o.Size = MinSize }, true},
		{"a payload too small for its numbers", func(o *Options) { o.Size = MinSize - 1 }, false},
		{"no payload", func(o *Options) { o.Size = 0 }, false},
		{"the largest payload", func(o *Options) { o.Size = MaxSize }, true},
		{"a payload larger than IPv4 can carry", func(o *Options) { o.Size = MaxSize + 1 }, false},
		{"an unknown protocol", func(o *Options) { o.Proto = "tcp" }, false},
		{"UDP without a port", func(o *Options) { o.Remote = netip.MustParseAddrPort("127.0.0.1:0") }, false},
		{"an IPv6 remote", func(o *Options) { o.Remote = netip.MustParseAddrPort("[::1]:9") }, false},
		{"no remote", func(o *Options) { o.Remote = netip.AddrPort{} }, false},
		{"nothing to send", func(o *Options) { o.Count = 0 }, false},
		{"the largest count", func(o *Options) { o.Count = MaxCount }, true},
		{"more than the largest count", func(o *Options) { o.Count = MaxCount + 1 }, false},
		{"a negative warm-up", func(o *Options) { o.Warmup = -1 }, false},
		{"a negative timeout", func(o *Options) { o.Timeout = -1 }, false},
		{"a negative interval", func(o *Options) { o.Interval = -1 }, false},
		{"an unknown wait", func(o *Options) { o.Wait = "adaptive" }, false},
		{"CPU 0", func(o *Options) { o.CPU = 0 }, true},
		{"a CPU below -1", func(o *Options) { o.CPU = -2 }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := good
			tc.change(&o)
			err := o.withDefaults().check()
			if tc.ok && err != nil || !tc.ok && !errors.Is(err, ErrOptions) {
				t.Errorf("error %v, want ok %t", err, tc.ok)
			}
		})
	}
}
