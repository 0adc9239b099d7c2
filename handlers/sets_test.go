// SPDX-License-Identifier: Apache-2.0

package handlers_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/spin"
)

// start runs a set on a NIC for tests.
func start(t *testing.T, name string, p handlers.Params, change func(*handlerstest.Config)) *handlerstest.NIC {
	t.Helper()
	r, ok := handlers.Lookup(name)
	if !ok {
		t.Fatalf("no handlers %q", name)
	}
	set, err := r.New(p, handlers.Env{})
	if err != nil {
		t.Fatal(err)
	}
	c := handlerstest.Config{
		Handlers: set.Handlers, Rulesets: set.Rulesets, State: set.State, Initial: set.Initial,
		Memory: make([]byte, set.Memory), HPUMemory: set.HPUMemory, Queue: set.Queue,
	}
	if change != nil {
		change(&c)
	}
	return handlerstest.New(t, c)
}

// checked returns the headers of a frame whose checksums are right.
func checked(t *testing.T, frame []byte) packet.Headers {
	t.Helper()
	h := packet.Parse(frame, len(frame))
	switch {
	case h.IPv4 == nil || !h.IPv4.ChecksumValid():
		t.Fatalf("no IPv4, or its checksum is wrong: % x", frame)
	case h.UDP != nil:
		if h.UDP.Checksum() == 0 || !h.UDPChecksumValid() {
			t.Fatalf("UDP checksum %#x: % x", h.UDP.Checksum(), frame)
		}
	case h.ICMP != nil:
		if packet.ChecksumOf(frame[h.Transport:h.Payload+h.PayloadLen]) != 0 {
			t.Fatalf("ICMP checksum: % x", frame)
		}
	default:
		t.Fatalf("neither UDP nor ICMP: % x", frame)
	}
	return h
}

// answersPeer checks that a frame goes back to where the test's packets come from.
func answersPeer(t *testing.T, h packet.Headers) {
	t.Helper()
	if h.Ethernet.Dst() != handlerstest.PeerMAC || h.Ethernet.Src() != handlerstest.HereMAC ||
		h.IPv4.Dst() != handlerstest.PeerAddr.As4() || h.IPv4.Src() != handlerstest.HereAddr.As4() {
		t.Errorf("the answer goes from %x %v to %x %v", h.Ethernet.Src(), h.IPv4.Src(), h.Ethernet.Dst(), h.IPv4.Dst())
	}
}

// payloads are of odd and even lengths, of none, and of what needs padding.
func payloads() (all [][]byte) {
	for _, n := range []int{0, 1, 17, 64, 1001, 1472} {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i * 7)
		}
		all = append(all, b)
	}
	return all
}

func TestEchoes(t *testing.T) {
	udp := func(payload []byte) []byte {
		return handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(5000), payload)
	}
	icmp := func(payload []byte) []byte {
		return handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 3, 4, payload)
	}
	for _, c := range []struct {
		name, set string
		params    handlers.Params
		frame     func([]byte) []byte
	}{
		{"ICMP", "echo-icmp", nil, icmp},
		{"UDP", "echo-udp", handlers.Params{"port": 5000}, udp},
		{"ICMP by the host", "echo-host", handlers.Params{"proto": "icmp"}, icmp},
		{"UDP by the host", "echo-host", handlers.Params{"port": 5000}, udp},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := start(t, c.set, c.params, nil)
			asked := 0
			if c.set == "echo-host" {
				n.Answer(func(r handlerstest.Request) handlerstest.Answer {
					asked++
					sum, ok := handlers.EchoSum(nil, r.Payload)
					if !ok {
						t.Error("asked for a checksum of what has none")
					}
					return handlerstest.Answer{Payload: sum}
				})
			}
			for i, payload := range payloads() {
				out := n.Packet(c.frame(payload))
				if out.Code() != spin.Success || len(out.Sent) != 1 {
					t.Fatalf("payload of %d bytes: %v, %d frames sent", len(payload), out.Code(), len(out.Sent))
				}
				h := checked(t, out.Sent[0])
				answersPeer(t, h)
				if h.UDP != nil && (h.UDP.SrcPort() != 5000 || h.UDP.DstPort() != 4000) ||
					h.ICMP != nil && (h.ICMP.Type() != packet.ICMPEchoReply || h.ICMP.ID() != 3 || h.ICMP.Seq() != 4) {
					t.Errorf("answer % x", out.Sent[0])
				}
				if !bytes.Equal(out.Sent[0][h.Payload:][:h.PayloadLen], payload) {
					t.Errorf("payload of %d bytes has changed", len(payload))
				}
				if c.set == "echo-host" && asked != i+1 {
					t.Errorf("asked %d times for %d packets", asked, i+1)
				}
			}
		})
	}
}

// TestEchoPartial echoes a datagram from a sender that leaves its checksum to the device.
func TestEchoPartial(t *testing.T) {
	for _, set := range []string{"echo-udp", "echo-host"} {
		n := start(t, set, nil, nil)
		if set == "echo-host" {
			n.Answer(func(r handlerstest.Request) handlerstest.Answer {
				sum, _ := handlers.EchoSum(nil, r.Payload)
				return handlerstest.Answer{Payload: sum}
			})
		}
		frame := handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), []byte("partial"))
		h := packet.Parse(frame, len(frame))
		var pseudo packet.Checksum
		pseudo.AddPseudo(h.IPv4.Src(), h.IPv4.Dst(), packet.ProtocolUDP, h.UDP.Length())
		h.UDP.SetChecksum(pseudo.Folded())
		out := n.Packet(frame)
		if len(out.Sent) != 1 {
			t.Fatalf("%s: %+v", set, out)
		}
		checked(t, out.Sent[0])
		for _, r := range out.Requests {
			if h := packet.Parse(r.Payload, len(r.Payload)); h.UDP.Checksum() != 0 {
				t.Error("the HPU has computed what the application is for")
			}
		}
	}
}

// TestDamagedRequests flips each bit of requests, behind the MAC addresses. No handler sends
// an answer: Linux drops them all.
func TestDamagedRequests(t *testing.T) {
	udp := handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(5000), []byte("a datagram of odd size"))
	icmp := handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 3, 4, []byte("a message of odd size"))
	// All of its sum is that of the pseudo-header: what has come by a wire has not.
	partial := bytes.Clone(udp)
	h := packet.Parse(partial, len(partial))
	var pseudo packet.Checksum
	pseudo.AddPseudo(h.IPv4.Src(), h.IPv4.Dst(), packet.ProtocolUDP, h.UDP.Length())
	h.UDP.SetChecksum(pseudo.Folded())
	for _, tt := range []struct {
		name, set string
		params    handlers.Params
		frame     []byte
		to        int // damage ends there
	}{
		{"ICMP", "echo-icmp", nil, icmp, len(icmp)},
		{"ICMP by the host", "echo-host", handlers.Params{"proto": "icmp"}, icmp, len(icmp)},
		{"UDP", "echo-udp", handlers.Params{"port": 5000}, udp, len(udp)},
		{"UDP by the host", "echo-host", handlers.Params{"port": 5000}, udp, len(udp)},
		{"requests", "requests", handlers.Params{"port": 5000}, udp, len(udp)},
		// Of the payload nothing can be known.
		{"UDP, partial", "echo-udp", handlers.Params{"port": 5000}, partial, packet.EthernetLen + packet.IPv4Len},
		{"UDP by the host, partial", "echo-host", handlers.Params{"port": 5000}, partial, packet.EthernetLen + packet.IPv4Len},
		{"requests, partial", "requests", handlers.Params{"port": 5000}, partial, packet.EthernetLen + packet.IPv4Len},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := start(t, tt.set, tt.params, func(c *handlerstest.Config) { c.Rulesets = nil }) // which would let few pass
			if tt.set != "echo-icmp" && tt.set != "echo-udp" {
				n.Answer(func(r handlerstest.Request) handlerstest.Answer {
					if tt.set == "requests" {
						return handlerstest.Answer{Payload: r.Payload}
					}
					sum, ok := handlers.EchoSum(nil, r.Payload)
					if !ok {
						return handlerstest.Answer{Status: 1}
					}
					return handlerstest.Answer{Payload: sum}
				})
			}
			whole := n.Packet(bytes.Clone(tt.frame))
			if len(whole.Sent) != 1 {
				t.Fatalf("no answer: %+v", whole)
			}
			for bit := 8 * 12; bit < 8*tt.to; bit++ {
				frame := bytes.Clone(tt.frame)
				frame[bit/8] ^= 1 << (bit % 8)
				if sent := n.Packet(frame).Sent; len(sent) > 0 {
					t.Errorf("bit %d of byte %d flipped: it is answered\n% x", bit%8, bit/8, sent[0])
				}
			}
		})
	}
}

// TestEchoHops looks at how many hops answers have to live.
func TestEchoHops(t *testing.T) {
	for _, tt := range []struct {
		name     string
		icmp     bool
		ttl, has uint8 // has 0: there is no answer
	}{
		{"a ping that has come by its last hop", true, 1, 64},
		{"a ping with none", true, 0, 64},
		{"a ping as Linux sends it", true, 64, 64},
		{"a ping with most", true, 255, 64},
		{"a datagram that has come by its last hop, which may be another echo's answer", false, 1, 0},
		{"a datagram with two", false, 2, 1},
		{"a datagram as Linux sends it", false, 64, 63},
	} {
		for _, set := range []string{"echo", "echo-host"} {
			t.Run(tt.name+", "+set, func(t *testing.T) {
				frame, proto := handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), []byte("hops")), "udp"
				if tt.icmp {
					frame, proto = handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 3, 4, []byte("hops")), "icmp"
				}
				ip := packet.IPv4(frame[packet.EthernetLen:])
				ip.SetTTL(tt.ttl)
				ip.SetChecksum(ip.HeaderChecksum())
				name, params := "echo-"+proto, handlers.Params(nil)
				if set == "echo-host" {
					name, params = set, handlers.Params{"proto": proto}
				}
				n := start(t, name, params, nil)
				if set == "echo-host" {
					n.Answer(func(r handlerstest.Request) handlerstest.Answer {
						sum, _ := handlers.EchoSum(nil, r.Payload)
						return handlerstest.Answer{Payload: sum}
					})
				}
				out := n.Packet(frame)
				if tt.has == 0 {
					if len(out.Sent) != 0 {
						t.Errorf("answered by % x", out.Sent[0])
					}
					return
				}
				if len(out.Sent) != 1 {
					t.Fatalf("no answer: %+v", out)
				}
				if h := checked(t, out.Sent[0]); h.IPv4.TTL() != tt.has || !h.IPv4.ChecksumValid() {
					t.Errorf("%d hops, want %d; the header's checksum is right: %v", h.IPv4.TTL(), tt.has, h.IPv4.ChecksumValid())
				}
			})
		}
	}
}

// TestEchoBuffers echoes packets that are not in one piece.
func TestEchoBuffers(t *testing.T) {
	text := bytes.Repeat([]byte("in pieces "), 30)
	for set, frame := range map[string][]byte{
		"echo-udp":  handlerstest.UDP(handlerstest.Peer(4000), handlerstest.Here(7), text),
		"echo-icmp": handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 3, 4, text),
	} {
		n := start(t, set, nil, func(c *handlerstest.Config) { c.Buffer = 100 })
		damaged := bytes.Clone(frame)
		damaged[len(damaged)-1] ^= 1
		if out := n.Packet(damaged); len(out.Sent) != 0 {
			t.Errorf("%s: answers what is damaged in its last buffer", set)
		}
		out := n.Packet(frame)
		if len(out.Sent) != 1 {
			t.Fatalf("%s: no answer: %+v", set, out)
		}
		if h := checked(t, out.Sent[0]); !bytes.Equal(out.Sent[0][h.Payload:], text) {
			t.Errorf("%s: the payload has changed", set)
		}
	}
}

// TestEchoHostWaits has many packets wait for the host, which answers in another order.
func TestEchoHostWaits(t *testing.T) {
	n := start(t, "echo-host", nil, nil)
	var frames [][]byte
	for i := range 50 {
		frames = append(frames, handlerstest.UDP(handlerstest.Peer(uint16(4000+i)), handlerstest.Here(7), []byte{byte(i)}))
	}
	out := n.Packet(frames...)
	if len(out.Requests) != 50 || len(out.Sent) != 0 {
		t.Fatalf("%d requests, %d frames sent before an answer", len(out.Requests), len(out.Sent))
	}
	n.Answer(func(r handlerstest.Request) handlerstest.Answer {
		if r.Tag != uint64(packet.ProtocolUDP) || !r.Reply {
			t.Errorf("request %+v", r)
		}
		sum, _ := handlers.EchoSum(nil, r.Payload)
		return handlerstest.Answer{Payload: sum}
	})
	out = n.Settle()
	if len(out.Sent) != 50 {
		t.Fatalf("%d frames sent for 50 answers", len(out.Sent))
	}
	ports := map[uint16]bool{}
	for _, f := range out.Sent {
		h := checked(t, f)
		ports[h.UDP.DstPort()] = true
	}
	if len(ports) != 50 {
		t.Errorf("answers to %d of 50 senders", len(ports))
	}
}

// TestEchoHostSegments has a packet that is not in one piece.
func TestEchoHostSegments(t *testing.T) {
	n := start(t, "echo-host", nil, func(c *handlerstest.Config) { c.Buffer = 100 })
	if out := n.Packet(handlerstest.UDP(handlerstest.Peer(1), handlerstest.Here(7), make([]byte, 100))); out.Code() != spin.Drop || len(out.Requests) != 0 {
		t.Errorf("%+v", out)
	}
}

// TestEchoHostRefuses sends what is not to be answered, and has the host refuse, answer
// nonsense and end.
func TestEchoHostRefuses(t *testing.T) {
	n := start(t, "echo-host", handlers.Params{"proto": "icmp"}, func(c *handlerstest.Config) { c.Rulesets = nil })
	reply := n.Packet(handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 1, 1, nil)).Requests[0].Payload
	broadcast := handlerstest.ICMPEcho(handlerstest.PeerAddr, netip.MustParseAddr("255.255.255.255"), 1, 1, nil)
	multicast := handlerstest.ICMPEcho(netip.MustParseAddr("224.0.0.1"), handlerstest.HereAddr, 1, 1, nil)
	group := handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 1, 1, nil)
	group[0] = 0xff
	for name, frame := range map[string][]byte{"a reply": reply, "to all": broadcast, "from a group": multicast, "to a group": group, "nothing": make([]byte, 60)} {
		if out := n.Packet(frame); out.Code() != spin.Drop || len(out.Requests) != 0 {
			t.Errorf("%s: %v, %d requests", name, out.Code(), len(out.Requests))
		}
	}
	answer := handlerstest.Answer{Status: 1, Payload: []byte{1, 2}}
	n.Answer(func(handlerstest.Request) handlerstest.Answer { return answer })
	if out := n.Settle(); len(out.Sent) != 0 { // that of the first packet
		t.Error("sent although the application has refused")
	}
	ping := handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 1, 1, nil)
	answer = handlerstest.Answer{Payload: []byte{1}}
	if out := n.Packet(ping); len(out.Requests) != 1 || len(out.Sent) != 0 {
		t.Error("sent with half a checksum")
	}
	n.Answer(nil)
	if out := n.Packet(ping); len(out.Requests) != 1 {
		t.Error("not asked")
	}
	if out := n.Detach(); len(out.Sent) != 0 {
		t.Error("sent although there is no application")
	}
	if out := n.Packet(ping); out.Code() != spin.Drop {
		t.Errorf("without application: %v", out.Code())
	}
}

func TestEchoSumOfNothing(t *testing.T) {
	for _, frame := range [][]byte{nil, make([]byte, 14), make([]byte, 60), handlerstest.UDP(handlerstest.Peer(1), handlerstest.Here(2), nil)[:41]} {
		if sum, ok := handlers.EchoSum(nil, frame); ok {
			t.Errorf("checksum %x of % x", sum, frame)
		}
	}
}

func TestDeposit(t *testing.T) {
	window := make(hpu.Memory, 10000)
	n := start(t, "deposit", nil, func(c *handlerstest.Config) { c.Windows = []hpu.NamedWindow{{Name: "in", Window: window}} })
	content := bytes.Repeat([]byte("0123456789abcdef"), 300)
	frames := handlerstest.Message(handlerstest.Peer(4000), 5, content, 1000)
	slices.Reverse(frames[1:])
	out := n.Packet(frames...)
	if len(out.Messages) != 1 || len(out.Sent) != len(frames) {
		t.Fatalf("%d events, %d frames sent", len(out.Messages), len(out.Sent))
	}
	e := out.Messages[0]
	if e.Cause != spin.Complete || e.Length != uint64(len(content)) || e.Missing != 0 || e.Number != 5 || e.Source != handlerstest.Peer(4000) {
		t.Errorf("event %+v", e)
	}
	if !bytes.Equal(window[:len(content)], content) {
		t.Error("the window has something else")
	}
	if len(out.Calls) != 1 || out.Calls[0].Handler != "header" {
		t.Errorf("calls %+v", out.Calls)
	}
	// A message that does not fit.
	out = n.Packet(handlerstest.Message(handlerstest.Peer(4000), 6, make([]byte, 10001), 1400)...)
	if len(out.Messages) != 1 || out.Messages[0].Cause != spin.Failed || !errors.Is(out.Messages[0].Err, spin.ErrBounds) {
		t.Errorf("too long: %+v", out.Messages)
	}
}

func TestRequests(t *testing.T) {
	n := start(t, "requests", handlers.Params{"port": 53}, nil)
	n.Answer(func(r handlerstest.Request) handlerstest.Answer {
		switch string(r.Payload) {
		case "silence":
			return handlerstest.Answer{Status: 1}
		case "long":
			return handlerstest.Answer{Payload: make([]byte, 1473)}
		}
		return handlerstest.Answer{Payload: bytes.Repeat(r.Payload, 3)}
	})
	for _, question := range []string{"", "x", "what is it?", strings.Repeat("long ", 80), "y"} {
		frame := handlerstest.UDP(handlerstest.Peer(4001), handlerstest.Here(53), []byte(question))
		ip := packet.IPv4(frame[packet.EthernetLen:])
		ip.SetTTL(3)
		ip.SetChecksum(ip.HeaderChecksum())
		out := n.Packet(frame)
		if len(out.Requests) != 1 || len(out.Sent) != 1 {
			t.Fatalf("%q: %d requests, %d answers", question, len(out.Requests), len(out.Sent))
		}
		if r := out.Requests[0]; string(r.Payload) != question || r.Tag != 0x0a000002_0fa1 {
			t.Errorf("%q: request %#x %q", question, r.Tag, r.Payload)
		}
		h := checked(t, out.Sent[0])
		answersPeer(t, h)
		if h.UDP.SrcPort() != 53 || h.UDP.DstPort() != 4001 || h.IPv4.TTL() != 2 {
			t.Errorf("answer % x", out.Sent[0][:42])
		}
		if got, want := string(h.UDP.Payload()), strings.Repeat(question, 3); got != want {
			t.Errorf("answer %q, want %q", got, want)
		}
		for _, b := range out.Sent[0][h.Payload+h.PayloadLen:] {
			if b != 0 {
				t.Fatal("the padding tells of other frames")
			}
		}
	}
	for _, question := range []string{"silence", "long"} {
		if out := n.Packet(handlerstest.UDP(handlerstest.Peer(4001), handlerstest.Here(53), []byte(question))); len(out.Requests) != 1 || len(out.Sent) != 0 {
			t.Errorf("%s: %d requests, %d answers", question, len(out.Requests), len(out.Sent))
		} else if logged := strings.Join(out.Log, "\n"); strings.Contains(logged, "an answer of 1473 bytes") != (question == "long") {
			t.Errorf("%s: the log says %q", question, logged)
		}
	}
	// One that cannot be answered does not get as far as the application.
	out := n.Packet(handlerstest.UDP(netip.MustParseAddrPort("224.0.0.1:5"), handlerstest.Here(53), []byte("x")))
	if out.Code() != spin.Drop || len(out.Requests) != 0 {
		t.Errorf("from a group: %v, %d requests", out.Code(), len(out.Requests))
	}
}

// TestRequestsOptions has a datagram with IP options, which rulesets of one's own may let
// through: its headers are longer than those of an answer.
func TestRequestsOptions(t *testing.T) {
	n := start(t, "requests", handlers.Params{"port": 53}, func(c *handlerstest.Config) { c.Rulesets = nil })
	frame := slices.Insert(handlerstest.UDP(handlerstest.Peer(1), handlerstest.Here(53), make([]byte, 40)), 34, 1, 1, 1, 0)
	ip := packet.IPv4(frame[packet.EthernetLen:])
	ip[0]++
	ip.SetTotalLen(uint16(ip.TotalLen() + 4))
	if h := packet.Parse(frame, len(frame)); h.UDP == nil || h.Payload != 46 {
		t.Fatal("that is no datagram with options")
	}
	if out := n.Packet(frame); out.Code() != spin.Drop || len(out.Requests) != 0 {
		t.Errorf("%+v", out)
	}
}

// TestRequestsFull has more questions than fit into the ring.
func TestRequestsFull(t *testing.T) {
	n := start(t, "requests", handlers.Params{"port": 53}, func(c *handlerstest.Config) { c.Requests = 2 })
	q := handlerstest.UDP(handlerstest.Peer(4001), handlerstest.Here(53), []byte("x"))
	out := n.Packet(q, q, q)
	if len(out.Requests) != 2 || out.Calls[2].Code != spin.Drop {
		t.Fatalf("%d requests, calls %+v", len(out.Requests), out.Calls)
	}
	n.Answer(func(handlerstest.Request) handlerstest.Answer { return handlerstest.Answer{} })
	if out := n.Packet(q); len(out.Sent) != 3 {
		t.Errorf("%d answers, want 3", len(out.Sent))
	}
}

func TestCount(t *testing.T) {
	frame := handlerstest.UDP(handlerstest.Peer(1), handlerstest.Here(2), make([]byte, 100))
	for _, to := range []string{"stack", "drop"} {
		n := start(t, "count", handlers.Params{"to": to}, nil)
		before := bytes.Clone(frame)
		out := n.Packet(frame, frame, frame)
		u := n.Stats().User[0]
		if u.Count != 3 || u.Sum != 3*142 {
			t.Errorf("%s: counted %+v", to, u)
		}
		if to == "drop" && (out.Code() != spin.Drop || len(out.Stack) != 0) ||
			to == "stack" && (out.Code() != spin.Success || len(out.Stack) != 3 || !bytes.Equal(out.Stack[0], before)) {
			t.Errorf("%s: %v, %d to the stack", to, out.Code(), len(out.Stack))
		}
	}
}

// TestCountEvents counts in what an application can wait for.
func TestCountEvents(t *testing.T) {
	netnstest.NeedRoot(t)
	pair, err := hostq.NewPair(hostq.PairConfig{Name: "count", Layout: hostq.Layout{Lanes: 1}})
	if err != nil {
		t.Fatal(err)
	}
	defer pair.Close()
	t.Run("", func(t *testing.T) {
		n := start(t, "count", nil, func(c *handlerstest.Config) { c.Host = pair })
		frame := handlerstest.UDP(handlerstest.Peer(1), handlerstest.Here(2), make([]byte, 100))
		n.Packet(frame, frame)
		if p, b := pair.Counter(handlers.CountPackets).Get(), pair.Counter(handlers.CountBytes).Get(); p != 2 || b != 2*142 {
			t.Errorf("counted %d packets, %d bytes", p, b)
		}
	})
}

func TestTick(t *testing.T) {
	n := start(t, "tick", handlers.Params{"to": "10.0.0.9:9400", "port": 77}, nil)
	ping := handlerstest.ICMPEcho(handlerstest.PeerAddr, handlerstest.HereAddr, 1, 1, make([]byte, 92))
	if out := n.Packet(ping, ping); len(out.Stack) != 2 {
		t.Errorf("%d packets to the stack", len(out.Stack))
	}
	for i := range uint64(2) {
		out := n.Tick()
		if out.Code() != spin.Success || len(out.Sent) != 1 {
			t.Fatalf("%+v", out)
		}
		h := packet.Parse(out.Sent[0], len(out.Sent[0]))
		if h.UDP == nil || h.UDP.SrcPort() != 77 || h.UDP.DstPort() != 9400 || h.IPv4.Dst() != [4]byte{10, 0, 0, 9} {
			t.Fatalf("sent % x", out.Sent[0])
		}
		b := h.UDP.Payload()
		if len(b) != 24 || binary.BigEndian.Uint64(b) != i+1 || binary.BigEndian.Uint64(b[8:]) != 2 || binary.BigEndian.Uint64(b[16:]) != 2*134 {
			t.Errorf("telemetry % x", b)
		}
	}
}

// unresolved knows no address, or has asked for it.
type unresolved struct{ err error }

func (u unresolved) Resolve(netip.Addr) (spin.Hop, error) { return spin.Hop{}, u.err }

func (u unresolved) From(netip.Addr) (spin.Hop, bool) { return spin.Hop{MTU: 1500}, false }

// asked is whose neighbours answer when they have been asked once.
type asked struct{ times int }

func (a *asked) Resolve(netip.Addr) (spin.Hop, error) {
	if a.times++; a.times == 1 {
		return spin.Hop{}, spin.ErrUnresolved
	}
	return spin.Hop{Source: netip.MustParseAddr("10.0.0.1"), MTU: 1500}, nil
}

func (a *asked) From(netip.Addr) (spin.Hop, bool) { return spin.Hop{MTU: 1500}, false }

// TestTickUnreachable has no way to the collector: it is no error that the first
// datagram has to wait for ARP.
func TestTickUnreachable(t *testing.T) {
	for err, lines := range map[error]int{spin.ErrUnresolved: 0, errors.New("no route"): 1} {
		n := start(t, "tick", handlers.Params{"to": "10.0.0.9:9400"}, func(c *handlerstest.Config) { c.Resolver = unresolved{err} })
		if out := n.Tick(); out.Code() != spin.Drop || len(out.Sent) != 0 || len(out.Log) != lines {
			t.Errorf("%v: %+v", err, out)
		}
	}
}

func TestPush(t *testing.T) {
	slmpFormat := func(c *handlerstest.Config) { c.Format = matcher.FormatByName("slmp") }
	n := start(t, "push", handlers.Params{"to": "10.0.0.9:9400"}, slmpFormat)
	window := make(hpu.Memory, 4096)
	for i := range window {
		window[i] = byte(i >> 3)
	}
	out := n.Trigger(hpu.Trigger{Words: [4]uint64{9500}, Window: window, Offset: 100, Length: 2500, Slice: 1000})
	if len(out.Sent) != 3 || len(out.Messages) != 1 || out.Messages[0].Cause != spin.Complete || out.Messages[0].Length != 2500 || out.Messages[0].Dropped != 0 {
		t.Fatalf("%d frames sent, events %+v", len(out.Sent), out.Messages)
	}
	var got []byte
	for _, f := range out.Sent {
		h := packet.Parse(f, len(f))
		if h.UDP == nil || h.UDP.DstPort() != 9500 || h.UDP.SrcPort() != 9402 || h.IPv4.Dst() != [4]byte{10, 0, 0, 9} {
			t.Fatalf("sent % x", f)
		}
		got = append(got, h.UDP.Payload()...)
	}
	if !bytes.Equal(got, window[100:2600]) {
		t.Error("something else was sent")
	}
	out = n.Trigger(hpu.Trigger{Window: window, Length: 8})
	if len(out.Sent) != 1 {
		t.Fatalf("%d frames sent", len(out.Sent))
	}
	if h := packet.Parse(out.Sent[0], len(out.Sent[0])); h.UDP.DstPort() != 9400 {
		t.Errorf("to port %d", h.UDP.DstPort())
	}

	n = start(t, "push", handlers.Params{"to": "10.0.0.9:9400"}, func(c *handlerstest.Config) {
		slmpFormat(c)
		c.Resolver = &asked{}
	})
	if out = n.Trigger(hpu.Trigger{Window: window, Length: 8}); len(out.Sent) != 1 {
		t.Errorf("the first message, with a neighbour that answers: %+v", out)
	}

	n = start(t, "push", handlers.Params{"to": "10.0.0.9:9400"}, func(c *handlerstest.Config) {
		slmpFormat(c)
		c.Resolver = unresolved{spin.ErrUnresolved}
	})
	out = n.Trigger(hpu.Trigger{Window: window, Length: 8})
	if len(out.Sent) != 0 || len(out.Log) != 1 || len(out.Messages) != 1 || out.Messages[0].Cause != spin.Failed {
		t.Errorf("unreachable: %+v", out)
	}
}

// TestSets has every set refuse a parameter that it does not know, and say what it does.
func TestSets(t *testing.T) {
	all := handlers.All()
	var names []string
	for _, r := range all {
		names = append(names, r.Name)
		if _, err := r.New(handlers.Params{"nonsense": 1}, handlers.Env{}); err == nil || !strings.Contains(err.Error(), `param "nonsense": no such parameter: `) {
			t.Errorf("%s: %v", r.Name, err)
		}
		if r.Help == "" || strings.Contains(r.Help, "\n") {
			t.Errorf("%s: help %q", r.Name, r.Help)
		}
	}
	want := []string{"count", "datatype", "deposit", "echo-host", "echo-icmp", "echo-udp", "push", "requests", "tick"}
	if !slices.Equal(names, want) {
		t.Errorf("there are %v, want %v", names, want)
	}
	for _, c := range []struct {
		set    string
		params handlers.Params
		err    string
	}{
		{"echo-host", handlers.Params{"proto": "tcp"}, `"tcp": want udp or icmp`},
		{"count", handlers.Params{"to": "hell"}, `"hell": want stack or drop`},
		{"requests", nil, `param "port": is missing`},
		{"requests", handlers.Params{"port": 1, "mtu": 20}, "want 68 to 65535"},
		{"tick", handlers.Params{"to": "[::1]:1"}, "want an IPv4 address"},
		{"tick", handlers.Params{"to": "10.0.0.1:0"}, "and a port"},
		{"push", handlers.Params{"to": "[::1]:1"}, "want an IPv4 address"},
	} {
		r, _ := handlers.Lookup(c.set)
		if _, err := r.New(c.params, handlers.Env{}); err == nil || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s %v: %v, want %q", c.set, c.params, err, c.err)
		}
	}
	if _, ok := handlers.Lookup("nonsense"); ok {
		t.Error("there are handlers of any name")
	}
}

func TestRegisterTwice(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a name that is taken was registered")
		}
	}()
	handlers.Register("count", "", func(handlers.Params) (*handlers.Set, error) { return nil, nil })
}

// Two echoes that somebody has answer each other come to an end: those of one port at
// once, others when the answers have no hops left.
func TestEchoesThatAnswerEachOther(t *testing.T) {
	for _, set := range []string{"echo-udp", "echo-host"} {
		nics := map[uint16]*handlerstest.NIC{}
		for _, port := range []uint16{7, 8} {
			nics[port] = start(t, set, handlers.Params{"port": int(port)}, nil)
			if set == "echo-udp" {
				continue
			}
			nics[port].Answer(func(r handlerstest.Request) handlerstest.Answer {
				sum, _ := handlers.EchoSum(nil, r.Payload)
				return handlerstest.Answer{Payload: sum}
			})
		}
		frame := handlerstest.UDP(handlerstest.Peer(8), handlerstest.Here(7), []byte("hello"))
		const turns = 64 - 1 // the hops that the first datagram has left
		for i := range uint16(turns + 1) {
			out := nics[7+i%2].Packet(frame)
			if i == turns {
				if len(out.Sent) != 0 {
					t.Errorf("%s: answered with no hops left", set)
				}
				break
			}
			if len(out.Sent) != 1 {
				t.Fatalf("%s: turn %d: %v, %d frames sent", set, i, out.Code(), len(out.Sent))
			}
			checked(t, out.Sent[0])
			frame = out.Sent[0]
			// The other echo is on another NIC, which it reaches as this one is reached.
			h := packet.Parse(frame, len(frame))
			h.Ethernet.Swap()
			h.IPv4.SwapAddrs()
		}
		if out := nics[7].Packet(handlerstest.UDP(handlerstest.Peer(7), handlerstest.Here(7), nil)); len(out.Sent) != 0 {
			t.Errorf("%s: answers its like", set)
		}
	}
}
