// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// What the model test of package slmp wants of the machines holds of the NIC, its
// handlers and the sender's socket, when frames between them are lost, duplicated,
// overtaken and damaged: see witness and ledger.
func TestMessagesThroughABadNetwork(t *testing.T) {
	for _, path := range []struct {
		name string
		cfg  impair.Config
	}{
		{"everything", impair.Config{Loss: 0.03, Duplicate: 0.02, Corrupt: 0.01, Reorder: 0.03, Delay: time.Millisecond, Seed: 3}},
		{"loss", impair.Config{Loss: 0.03, Seed: 4}},
	} {
		t.Run(path.name, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{Path: &path.cfg})
			again := uint64(0)
			for _, p := range policies() {
				if p.spec.Policy == nic.BlockedRR && (p.spec.VHPUs < 7 || path.cfg.Delay == 0) || p.spec.Policy == nic.ByMessage && path.cfg.Delay == 0 {
					continue // one of them will do
				}
				for _, plain := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s, plain=%v", p.name, plain), func(t *testing.T) {
						again += badNetwork(t, lab, p, plain).Duplicates
					})
				}
			}
			st, err := lab.PathState()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("to the NIC: %+v", st.FromHost)
			t.Logf("from the NIC: %+v", st.ToHost)
			for _, n := range []impair.Counters{st.FromHost, st.ToHost} {
				all := n.Lost > 0 && n.Duplicated > 0 && n.Corrupted > 0 && n.Reordered > 0 && n.Delayed > n.Reordered
				none := n.Lost > 0 && n.Duplicated == 0 && n.Corrupted == 0 && n.Reordered == 0
				if path.cfg.Delay > 0 && !all || path.cfg.Delay == 0 && !none {
					t.Errorf("this was another network: %+v", n)
				}
			}
			if again == 0 {
				t.Error("no segment came a second time")
			}
		})
	}
}

// badNetwork sends messages of all sorts at once, whose handlers watch. It returns
// what became of them.
func badNetwork(t *testing.T, lab *netns.Lab, p policy, plain bool) spin.MessageStats {
	n := open(t, lab, nic.Config{HPUs: 3, Workers: 2})
	w := newWitness(t, p.spec.Policy == nic.ByMessage)
	l := newLedger()
	events := make(chan spin.MessageEvent, 100)
	spec := p.spec
	spec.Name, spec.Rulesets, spec.Events = "slmp", sets(matcher.SLMP()), events
	spec.Handlers = l.keep(w.handlers())
	spec.Checksums = hpu.VerifyAll // one good one in 65536 could be taken for an incomplete one
	c := run(t, n, spec)
	conn := connect(t, lab, slmp.Port, slmp.Config{Plain: plain})
	answers := answersAt(t, lab.PathNS, impair.NICPort)

	size := conn.Stats().Payload
	lengths := []int{0, 1, size, 300_000, 1_000_000, size + 1, 1, 300_000, 2 * size}
	ids := make([]messageID, len(lengths))
	send := func(i int) {
		data := noise(lengths[i])
		d, err := conn.SendBytes(patient(t), data, slmp.Options{})
		if err != nil {
			t.Errorf("%d bytes: %v\n%+v\n%+v\n%+v", lengths[i], err, conn.Stats(), messages(t, c), c.Stats())
			return
		}
		ids[i] = messageID{conn.LocalAddr(), d.ID}
		w.check(ids[i], data)
	}
	var wg sync.WaitGroup
	for i := range len(lengths) - 1 {
		wg.Go(func() { send(i) })
	}
	wg.Wait()
	send(len(lengths) - 1) // behind late copies of the others
	if t.Failed() {
		t.FailNow()
	}
	idle(t, c)
	eventually(t, "no bucket is held", func() bool { return c.HeldBuckets() == 0 })

	w.mu.Lock()
	for id, s := range w.all {
		t.Errorf("message %v: %d header, %d completion handlers, %d bytes after its end", id, s.headers, s.completions, len(s.data))
	}
	w.mu.Unlock()
	ended := map[uint32]uint64{}
	for range len(events) {
		e := nextEvent(t, events)
		if _, again := ended[e.Number]; again || e.Cause != spin.Complete || e.Missing != 0 || e.Dropped != 0 {
			t.Errorf("event %+v", e)
		}
		ended[e.Number] = e.Length
	}
	for i, id := range ids {
		if length, ok := ended[id.id]; !ok || length != uint64(lengths[i]) || len(ended) != len(ids) {
			t.Errorf("message %v of %d bytes: one of %d events: %v, of %d bytes", id, lengths[i], len(ended), ok, length)
		}
	}
	st, cs, ss := messages(t, c), c.Stats(), conn.Stats()
	all, room := uint64(len(lengths)), spin.Drops{spin.DropNoHeader: st.Dropped[spin.DropNoHeader]}
	if st.Started != all || st.Ended != all || st.Open != 0 || st.HeldNow != 0 || st.Memory != 0 || st.Dropped != room {
		t.Errorf("%+v", st)
	}
	damaged := lab.Path.Corrupt > 0
	if cs.Headers != all || cs.Completions != all || cs.Unverified != 0 || cs.Failed+cs.Panics+cs.Overruns != 0 || (cs.Corrupt > 0) != damaged {
		t.Errorf("%+v", cs)
	}
	if damaged && st.Duplicates == 0 {
		t.Error("no segment came a second time")
	}
	// A damaged acknowledgement never gets as far as to be one of something else.
	// One acknowledgement may be cut short: a bit that is flipped in UDP's length changes the sum as bytes do that are
	// missing then, if these are of a bitmap such as 0xfffffff7.
	if ss.Completed != all || ss.Retransmitted == 0 || ss.Malformed > 1 || ss.NeverSent != 0 || ss.Cumulative == plain {
		t.Errorf("%+v", ss)
	}
	if claims := l.audit(t, answers(), ids, lengths, uint64(size), plain); claims < 100 {
		t.Errorf("answers claim %d things", claims)
	}
	return st
}

// A ledger knows when each segment of each message was processed, and when the
// completion handler had run.
type ledger struct {
	mu        sync.Mutex
	segments  map[segmentID]time.Time
	completed map[messageID]time.Time
}

type segmentID struct {
	messageID
	offset uint64
}

func newLedger() *ledger {
	return &ledger{segments: map[segmentID]time.Time{}, completed: map[messageID]time.Time{}}
}

// keep returns handlers that keep the ledger. Some take long, before h sees
// anything, so that what is run or acknowledged too early shows.
func (l *ledger) keep(h hpu.Handlers) hpu.Handlers {
	slow := func() { time.Sleep(300 * time.Microsecond) }
	header, payload, completion := h.Header, h.Payload, h.Completion
	h.Header = func(h *hpu.HER) spin.Code {
		slow()
		return header(h)
	}
	h.Payload = func(h *hpu.HER) spin.Code {
		if h.Offset()%16 == 0 {
			slow()
		}
		code := payload(h)
		m := h.Message()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.segments[segmentID{messageID{m.Source(), m.Number()}, uint64(h.Offset())}] = time.Now()
		return code
	}
	h.Completion = func(c *hpu.Completion) spin.Code {
		slow()
		code := completion(c)
		m := c.Message()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.completed[messageID{m.Source(), m.Number()}] = time.Now()
		return code
	}
	return h
}

// audit says that no answer told of more than what had been processed when the NIC
// sent it, and returns how many things they told of messages that had not ended.
func (l *ledger) audit(t *testing.T, answers []stamped, ids []messageID, lengths []int, size uint64, plain bool) (claims int) {
	t.Helper()
	length := map[messageID]uint64{}
	for i, id := range ids {
		length[id] = uint64(lengths[i])
	}
	early := 0
	for _, a := range answers {
		id := messageID{a.to, a.ID}
		n, known := length[id]
		if !known || a.Cumulative == plain || a.Wait && plain {
			t.Errorf("answer to nobody, or of another kind: %+v", a)
			continue
		}
		over, ended := l.completed[id]
		if ended && !a.at.Before(over) {
			continue // whatever it says
		}
		last := max(n, 1) - 1
		last -= last % size
		claim := func(offset uint64) {
			claims++
			done, ok := l.segments[segmentID{id, offset}]
			if !ok || a.at.Before(done) || offset > last {
				if early++; early < 10 {
					t.Errorf("%v was answered %v before offset %d of %d bytes was processed: %+v", id, done.Sub(a.at), offset, n, a)
				}
			}
		}
		if !a.Wait {
			claim(uint64(a.Offset))
			if uint64(a.Offset) == last || a.End == slmp.EndMax {
				t.Errorf("%v was acknowledged %v before its completion: %+v", id, over.Sub(a.at), a)
			}
		}
		for offset := uint64(0); offset < min(uint64(a.End), n); offset += size {
			claim(offset)
		}
		for w, word := range a.Bitmap {
			for i := range 64 {
				if word>>i&1 != 0 {
					claim(uint64(a.End) + uint64(64*w+i+1)*size)
				}
			}
		}
	}
	t.Logf("%d answers, %d claims", len(answers), claims)
	return claims
}

// A stamped answer is one that the NIC has sent, before anything happens to it.
type stamped struct {
	slmp.Ack
	to netip.AddrPort
	at time.Time
}

// answersAt watches what the NIC of a lab sends, where it arrives at the other end of its
// link. The function that it returns ends this and returns all answers.
func answersAt(t *testing.T, ns *netns.Namespace, device string) func() []stamped {
	t.Helper()
	var fd int
	err := ns.Do(func() error {
		var ifr *unix.Ifreq
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) // nothing before bind
		if err != nil {
			return err
		}
		if ifr, err = unix.NewIfreq(device); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, ifr); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 10_000}),
			// All protocols are seen before tc, which takes the frames away.
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bits.ReverseBytes16(unix.ETH_P_ALL), Ifindex: int(ifr.Uint32())}),
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	var answers []stamped
	var failure error
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		defer unix.Close(fd)
		b, oob := make([]byte, 42+slmp.MaxAckLen), make([]byte, 128)
		for {
			n, k, _, _, err := unix.Recvmsg(fd, b, oob, 0)
			if err == unix.EAGAIN {
				select {
				case <-stop:
					return
				default:
					continue
				}
			}
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				failure = err
				return
			}
			if n < 42 || binary.BigEndian.Uint16(b[12:]) != unix.ETH_P_IP || b[23] != unix.IPPROTO_UDP || binary.BigEndian.Uint16(b[34:]) != slmp.Port {
				continue
			}
			a, err := slmp.ParseAck(b[42 : 34+binary.BigEndian.Uint16(b[38:])])
			if err != nil {
				failure = err
				return
			}
			cmsgs, err := unix.ParseSocketControlMessage(oob[:k])
			if err != nil || len(cmsgs) != 1 || len(cmsgs[0].Data) < 16 {
				failure = fmt.Errorf("no time of arrival: %v, %w", cmsgs, err)
				return
			}
			sec, nsec := binary.NativeEndian.Uint64(cmsgs[0].Data), binary.NativeEndian.Uint64(cmsgs[0].Data[8:])
			answers = append(answers, stamped{
				a, netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[30:34])), binary.BigEndian.Uint16(b[36:])), time.Unix(int64(sec), int64(nsec)),
			})
		}
	}()
	end := sync.OnceFunc(func() {
		close(stop)
		<-stopped
	})
	t.Cleanup(end)
	return func() []stamped {
		end()
		if failure != nil {
			t.Errorf("watching answers: %v", failure)
		}
		return answers
	}
}
