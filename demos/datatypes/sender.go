// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/xspin/xspin/slmp"
)

// A sender sends a transfer's messages to whoever asks for them.
type sender struct {
	udp    *net.UDPConn                  // requests
	failed func(error)                   // told what went wrong, in any goroutine
	asked  func(request, netip.AddrPort) // told what was asked for. Optional

	mu        sync.Mutex
	transfers []*packed
	current   *packed

	// Of the goroutine that listens.
	conn *slmp.Conn // to the last who asked
	from netip.AddrPort
	last map[netip.AddrPort]uint64 // the number of the last request of each

	// Under mu.
	open   int        // messages in flight
	none   *sync.Cond // signalled when open becomes 0
	before sentSoFar  // by connections that are closed
}

// packed is a transfer and the streams of its messages. They are packed outside rounds:
// when the transfer is opened, or asked for with another count.
type packed struct {
	*layout
	streams [][]byte // that messages of a round have, in turn
}

// makeStream makes the stream of a message. Tests replace it.
var makeStream = (*layout).pack

func newPacked(t Transfer) (*packed, error) {
	l, err := newLayout(t)
	if err != nil {
		return nil, err
	}
	stream, err := makeStream(l, 0)
	return &packed{l, [][]byte{stream}}, err
}

// differ returns the transfer with messages that differ.
func (p *packed) differ() (*packed, error) {
	d := &packed{p.layout, p.streams[:1:1]}
	for i := 1; i < p.contents(); i++ {
		stream, err := makeStream(p.layout, i)
		if err != nil {
			return nil, err
		}
		d.streams = append(d.streams, stream)
	}
	return d, nil
}

func listen(local netip.AddrPort, failed func(error)) (*sender, error) {
	udp, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(local))
	if err != nil {
		return nil, err
	}
	s := &sender{udp: udp, failed: failed, last: map[netip.AddrPort]uint64{}}
	s.none = sync.NewCond(&s.mu)
	return s, nil
}

// runSender is the process.
func runSender(t *terminal, local netip.AddrPort) (err error) {
	s, err := listen(local, func(err error) { t.say(answer{Error: err.Error(), Failed: true}) })
	if err != nil {
		return err
	}
	go s.serve(context.Background())
	defer func() { err = errors.Join(err, s.close()) }()
	if _, err := fmt.Println("ready"); err != nil {
		return err
	}
	t.serve(func(_ context.Context, q ask) answer {
		switch {
		case q.Open != nil:
			if err := s.add(*q.Open); err != nil {
				return refused(err)
			}
			return answer{}
		case q.Transfer != nil:
			if err := s.choose(*q.Transfer, q.Differ); err != nil {
				return refused(err)
			}
			return answer{}
		case q.Sent:
			return answer{Sent: s.sent()}
		}
		return refused(errors.New("not understood"))
	})
	return nil
}

// add packs the messages of a new transfer, and makes it the current one.
func (s *sender) add(t Transfer) error {
	p, err := newPacked(t)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.transfers = append(s.transfers, p)
	s.current = p
	s.mu.Unlock()
	return nil
}

// choose makes a transfer the current one.
func (s *sender) choose(i int, differ bool) (err error) {
	s.mu.Lock()
	p := s.transfers[i]
	s.mu.Unlock()
	if differ {
		if p, err = p.differ(); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.current = p
	s.mu.Unlock()
	return nil
}

// serve takes requests until the socket is closed or ctx ends.
func (s *sender) serve(ctx context.Context) {
	b := make([]byte, 64)
	for {
		n, from, err := s.udp.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
			return
		}
		if err != nil {
			continue // an ICMP error: the asker is gone
		}
		if err := s.request(b[:n], from); err != nil {
			s.failed(fmt.Errorf("asked by %v: %w", from, err))
		}
	}
}

// maxAsking limits the askers whose last number is kept.
const maxAsking = 1024

// request sends what is asked for, unless the request is a repeated one.
func (s *sender) request(b []byte, from netip.AddrPort) error {
	r, numbered, err := parseRequest(b)
	if err != nil {
		return err
	}
	if numbered {
		if n, ok := s.last[from]; ok && n == r.Run {
			return nil // repeated
		}
		if len(s.last) >= maxAsking {
			clear(s.last)
		}
		s.last[from] = r.Run
	}
	s.mu.Lock()
	p := s.current
	s.mu.Unlock()
	if p == nil {
		return errors.New("there is nothing to send yet")
	}
	if int64(r.Elements) != p.Count {
		t := p.Transfer
		t.Count = int64(r.Elements)
		if p, err = newPacked(t); err != nil {
			return err
		}
	}
	if err := s.connect(from); err != nil {
		return err
	}
	if s.asked != nil {
		s.asked(r, from)
	}
	s.mu.Lock()
	s.open += int(r.Parallel)
	s.mu.Unlock()
	for i := range r.Parallel {
		if err := s.conn.Post(p.streams[int(i)%len(p.streams)], s.ended); err != nil {
			s.over(int(r.Parallel - i))
			return err
		}
	}
	return nil
}

func (s *sender) ended(err error) {
	if err != nil && !errors.Is(err, net.ErrClosed) {
		s.failed(err)
	}
	s.over(1)
}

func (s *sender) over(messages int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open -= messages; s.open == 0 {
		s.none.Broadcast()
	}
}

// connect connects to the asker.
func (s *sender) connect(from netip.AddrPort) (err error) {
	if s.conn != nil {
		if from.Addr() == s.from.Addr() {
			return nil
		}
		s.hangUp()
	}
	to := netip.AddrPortFrom(from.Addr().Unmap(), slmp.Port)
	conn, err := slmp.Dial(context.Background(), to.String(), slmp.Config{})
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.conn, s.from = conn, from
	s.mu.Unlock()
	return nil
}

// hangUp closes the connection, and gives up messages in flight.
func (s *sender) hangUp() {
	s.mu.Lock()
	conn := s.conn
	s.conn = nil
	s.mu.Unlock()
	if conn == nil {
		return
	}
	conn.Close()
	st := conn.Stats()
	s.mu.Lock()
	s.before.Segments += st.Segments - st.Retransmitted
	s.before.Retransmitted += st.Retransmitted
	s.mu.Unlock()
}

// sent waits until all messages in flight have been acknowledged, and returns what was
// sent.
func (s *sender) sent() *sentSoFar {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.open > 0 {
		s.none.Wait()
	}
	all := s.before
	if s.conn != nil {
		st := s.conn.Stats()
		all.Segments += st.Segments - st.Retransmitted
		all.Retransmitted += st.Retransmitted
	}
	return &all
}

func (s *sender) close() error {
	err := s.udp.Close()
	s.hangUp()
	return err
}
