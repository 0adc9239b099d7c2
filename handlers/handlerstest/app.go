// SPDX-License-Identifier: Apache-2.0

package handlerstest

import (
	"bytes"
	"fmt"

	"github.com/xspin/xspin/hostq"
)

// A Request is a handler's request to the application.
type Request struct {
	Tag     uint64
	HPU     int
	Reply   bool // an answer is wanted
	Payload []byte
}

// An Answer is the application's answer to a Request.
type Answer struct {
	Status  int32
	Payload []byte
}

// application is the application, which the test is. It is the context's hpu.Host, in
// place of a hostq.Pair, which needs privileges.
type application struct {
	w     *wire // its lock guards what follows
	slots int   // limits the requests not yet taken, and those without an answer

	next     uint64
	waiting  []request // for the application
	seen     []Request // since the last Outcome
	asked    map[uint64]asked
	answered []hostq.Response
	detached bool
}

type request struct {
	Request
	id uint64
}

type asked struct {
	tag  uint64
	user any
}

// Request implements hpu.Host.
func (a *application) Request(_ int, r *hostq.Request, user any) (uint64, error) {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	switch {
	case a.detached:
		return 0, hostq.ErrDetached
	case len(r.Payload) > hostq.DefaultPayload:
		return 0, fmt.Errorf("%d bytes: %w", len(r.Payload), hostq.ErrTooLong)
	case len(a.waiting) >= a.slots || len(a.asked) >= a.slots:
		return 0, hostq.ErrFull
	}
	a.next++
	q := Request{r.Tag, int(r.HPU), r.Reply, bytes.Clone(r.Payload)}
	a.waiting = append(a.waiting, request{q, a.next})
	a.seen = append(a.seen, q)
	if r.Reply {
		a.asked[a.next] = asked{r.Tag, user}
	}
	a.w.busy()
	a.w.quiet.Broadcast()
	return a.next, nil
}

// Poll implements hpu.Host.
func (a *application) Poll(_, most int, f func(*hostq.Response)) int {
	a.w.mu.Lock()
	n := min(most, len(a.answered))
	now := a.answered[:n:n]
	a.answered = a.answered[n:]
	if n > 0 {
		a.w.busy()
	}
	a.w.mu.Unlock()
	for i := range now {
		f(&now[i])
	}
	return n
}

// Cancel implements hpu.Host.
func (a *application) Cancel(id uint64) bool {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	_, ok := a.asked[id]
	delete(a.asked, id)
	return ok
}

// Outstanding implements hpu.Host.
func (a *application) Outstanding(int) int {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	return len(a.asked) + len(a.answered)
}

// Doorbell implements hpu.Host: a test that answers keeps the worker awake.
func (a *application) Doorbell(int) int { return -1 }

// Arm implements hpu.Host.
func (a *application) Arm(int) bool {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	return len(a.answered) == 0
}

// Disarm implements hpu.Host.
func (a *application) Disarm(int) {}

// Counter implements hpu.Host. Counting events are only in the memory of a pair.
func (a *application) Counter(int) *hostq.Counter { return nil }

// Detach implements hpu.Host.
func (a *application) Detach() {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	a.detached = true
	for id, q := range a.asked {
		a.answered = append(a.answered, hostq.Response{ID: id, Tag: q.tag, User: q.user, Err: hostq.ErrDetached})
	}
	clear(a.asked)
	a.waiting = nil
}

// news returns the requests since the last call.
func (a *application) news() []Request {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	seen := a.seen
	a.seen = nil
	return seen
}

// take takes a request.
func (a *application) take() (r request, ok bool) {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	if len(a.waiting) == 0 {
		return r, false
	}
	r = a.waiting[0]
	a.waiting = a.waiting[1:]
	return r, true
}

// respond answers a request, unless it was cancelled.
func (a *application) respond(id uint64, answer Answer) {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	q, ok := a.asked[id]
	if !ok {
		return
	}
	delete(a.asked, id)
	a.answered = append(a.answered, hostq.Response{
		ID: id, Tag: q.tag, Status: answer.Status, Payload: bytes.Clone(answer.Payload), User: q.user,
	})
}
