// SPDX-License-Identifier: Apache-2.0

package hostq

// PairConfig describes a Pair. Zero fields get their defaults.
type PairConfig struct {
	Name        string // for bpftool
	Layout             // Lanes: Required
	Outstanding int    // requests without their response yet, of all lanes. Defaults to Requests
}

// A Pair is the NIC's side of the queues to one application: events and requests go
// to it, responses come back. Event and Request may be called by any number of
// threads at the same time.
type Pair struct {
	cfg PairConfig
}

// NewPair makes a pair with nobody attached. Events are queued nevertheless.
func NewPair(cfg PairConfig) (*Pair, error) { panic("not yet") }

// Layout returns what the application's side needs to know.
func (p *Pair) Layout() Layout { return p.cfg.Layout }

// Descriptors returns what the application's side needs: the memory, the end of the
// bell that it reads, and for each lane the end of a bell that it writes. They stay
// the pair's.
func (p *Pair) Descriptors() (memory, bell int, lanes []int) { panic("not yet") }

// Event tells the application something. False: there is no room.
func (p *Pair) Event(e *Event) bool { panic("not yet") }

// LoseEvent counts an event that nobody will get; an Overflow event says so as soon
// as there is room.
func (p *Pair) LoseEvent() { panic("not yet") }

// Request asks the application something. The response will come out of Poll of the
// lane, with user. ErrFull: no slot is free, or as many requests are outstanding as
// there may be; ErrDetached, ErrBroken, ErrTooLong.
func (p *Pair) Request(lane int, r *Request, user any) (id uint64, err error) { panic("not yet") }

// Poll calls f for responses of a lane, up to most of them, and returns how many. When
// the application is gone, f gets what is outstanding, with ErrDetached. One thread at
// a time: if another polls the lane it returns 0.
func (p *Pair) Poll(lane, most int, f func(*Response)) int { panic("not yet") }

// Cancel forgets a request: its response, if any comes, is counted as late. It
// returns false if Poll has handed out the response already.
func (p *Pair) Cancel(id uint64) bool { panic("not yet") }

// Outstanding returns how many requests of a lane have no response yet.
func (p *Pair) Outstanding(lane int) int { panic("not yet") }

// Bell returns a descriptor that becomes readable when the application rings for a
// lane that is armed. It is for epoll with EPOLLET, and never to be read.
func (p *Pair) Bell(lane int) int { panic("not yet") }

// Arm says that the poller of a lane is about to sleep. It returns false, and is not
// armed, if there is something to poll.
func (p *Pair) Arm(lane int) bool { panic("not yet") }

// Disarm says that it is awake.
func (p *Pair) Disarm(lane int) { panic("not yet") }

// Counter returns counting event i, below Counters.
func (p *Pair) Counter(i int) *Counter { panic("not yet") }

// Detach says that there is no application any more: requests fail, and those that
// are outstanding get ErrDetached from Poll. Final.
func (p *Pair) Detach() { panic("not yet") }

// Close frees the pair. Nobody may use it any more.
func (p *Pair) Close() error { panic("not yet") }

// PairStats are counters of a pair.
type PairStats struct {
	Events      uint64 `json:"events"`      // given to the application
	EventsFull  uint64 `json:"events_full"` // found no room
	EventsLost  uint64 `json:"events_lost"` // for good
	Requests    uint64 `json:"requests"`
	Full        uint64 `json:"full"`        // requests that found no room
	Responses   uint64 `json:"responses"`   // that somebody waited for
	Late        uint64 `json:"late"`        // that nobody waited for any more
	Bogus       uint64 `json:"bogus"`       // that answer nothing, or with impossible lengths
	Outstanding int    `json:"outstanding"` // requests, now
	Waiting     int    `json:"waiting"`     // events and requests that the application has not taken
	Rung        uint64 `json:"rung"`        // system calls to wake the application
	Broken      bool   `json:"broken"`      // see ErrBroken
}

// Stats returns the counters.
func (p *Pair) Stats() PairStats { panic("not yet") }

// A Counter is a counting event: the NIC, its handlers and the application add to
// it, and the application can wait for a value. Safe for concurrent use.
type Counter struct{}

// Add adds to the counter and returns its new value.
func (c *Counter) Add(n uint64) uint64 { panic("not yet") }

// Get returns the counter's value.
func (c *Counter) Get() uint64 { panic("not yet") }

// Set sets the counter's value.
func (c *Counter) Set(v uint64) { panic("not yet") }
