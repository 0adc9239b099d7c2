// SPDX-License-Identifier: Apache-2.0

package hpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/xspin/xspin/spin"
)

// Bounds of Receives.
const (
	// MaxReceives is how many can be posted.
	MaxReceives = 1 << 16
	// MaxIgnores is how many different Ignores they can have: what a worker looks
	// through for a message, instead of all of them.
	MaxIgnores = 64
)

// Errors of Receives.
var (
	// ErrNoReceive is why a message was refused for which no receive is posted.
	ErrNoReceive = errors.New("no receive is posted for the message")
	// ErrReceives is wrapped by errors of receives for which there is no room.
	ErrReceives = errors.New("no room for the receive")
)

// Receives is a Binder with a list of posted receives: a message takes the first
// that matches. Safe for concurrent use. The zero value has none.
type Receives struct {
	mu     sync.Mutex
	groups []receiveGroup // by Ignore
	n      int
	seq    uint64 // of the last that was posted
}

// A receiveGroup has the receives of one Ignore: for each tag, without the ignored
// bits, those that wait, oldest first.
type receiveGroup struct {
	ignore uint32
	byTag  map[uint32][]postedReceive
}

type postedReceive struct {
	spin.Receive
	seq uint64
}

// Post adds a receive at the end of the list. The error wraps ErrReceives.
func (l *Receives) Post(r spin.Receive) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == MaxReceives {
		return fmt.Errorf("%w: %d are posted, the maximum", ErrReceives, l.n)
	}
	i := l.group(r.Ignore)
	if i < 0 {
		if len(l.groups) == MaxIgnores {
			return fmt.Errorf("%w: those that are posted have %d different ignores, and %#x would be one more", ErrReceives, MaxIgnores, r.Ignore)
		}
		i = len(l.groups)
		l.groups = append(l.groups, receiveGroup{r.Ignore, map[uint32][]postedReceive{}})
	}
	l.seq++
	tag := r.Tag &^ r.Ignore
	l.groups[i].byTag[tag] = append(l.groups[i].byTag[tag], postedReceive{r, l.seq})
	l.n++
	return nil
}

// Unpost takes back the first receive with the tag and the ignore for which is holds.
// False: there is none.
func (l *Receives) Unpost(tag, ignore uint32, is func(*spin.Receive) bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.group(ignore)
	if i < 0 {
		return false
	}
	for j, p := range l.groups[i].byTag[tag&^ignore] {
		if p.Tag == tag && is(&p.Receive) {
			l.remove(i, tag&^ignore, j)
			return true
		}
	}
	return false
}

// Posted returns how many receives wait.
func (l *Receives) Posted() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

// Bind implements Binder.
func (l *Receives) Bind(m *Message) (spin.Binding, error) {
	if b, ok := l.take(m.Number()); ok {
		return b, nil
	}
	return spin.Binding{}, fmt.Errorf("message %d from %v: %w", m.Number(), m.Source(), ErrNoReceive)
}

// take finds the receive for a message, and takes it off the list.
func (l *Receives) take(n uint32) (spin.Binding, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	group, seq := -1, uint64(0)
	for i := range l.groups {
		waiting := l.groups[i].byTag[n&^l.groups[i].ignore]
		if len(waiting) > 0 && (group < 0 || waiting[0].seq < seq) {
			group, seq = i, waiting[0].seq
		}
	}
	if group < 0 {
		return spin.Binding{}, false
	}
	tag := n &^ l.groups[group].ignore
	r := l.groups[group].byTag[tag][0]
	if !r.Keep {
		l.remove(group, tag, 0)
	}
	return r.Binding, true
}

// Unbind implements Binder.
func (l *Receives) Unbind(*Message, *spin.Result) {}

func (l *Receives) group(ignore uint32) int {
	return slices.IndexFunc(l.groups, func(g receiveGroup) bool { return g.ignore == ignore })
}

// remove takes the jth receive with the tag out of group i. The caller has the lock.
func (l *Receives) remove(i int, tag uint32, j int) {
	g := &l.groups[i]
	waiting := g.byTag[tag]
	switch {
	case len(waiting) > 1 && j == 0:
		waiting[0] = postedReceive{} // the rest of the array may stay for long
		g.byTag[tag] = waiting[1:]
	case len(waiting) > 1:
		g.byTag[tag] = slices.Delete(waiting, j, j+1)
	case len(g.byTag) > 1:
		delete(g.byTag, tag)
	default:
		l.groups = slices.Delete(l.groups, i, i+1) // an application may never use this Ignore again
	}
	l.n--
}
