// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/loader"
	"github.com/xspin/xspin/spin"
)

// handOverTier is both tiers: handlers in eBPF get all messages, and leave those that their
// header handler hands over to handlers in Go. Each message is in one of them.
type handOverTier struct {
	kernel *kernelTier
	user   hpuTier
}

// HandOverSlots returns how many slots there are for messages of a context that hands over,
// if so many may be in flight in each tier; 0 for the default. Those in the kernel come first.
func HandOverSlots(messages int) int { return 2 * cmp.Or(messages, defaultKernelMessages) }

func (t handOverTier) install() error {
	if err := t.user.install(); err != nil {
		return err
	}
	if err := t.kernel.install(); err != nil {
		return errors.Join(err, t.user.stop(0)) // nothing has come
	}
	return nil
}

func (t handOverTier) arm() error { return t.user.arm() }

// drain drains both at once, so that it takes no longer than one of them may.
func (t handOverTier) drain(d time.Duration) error {
	told := make(chan error)
	go func() { told <- t.kernel.drain(d) }()
	return errors.Join(t.user.drain(d), <-told)
}

// stop: first those who hand over.
func (t handOverTier) stop(d time.Duration) error {
	return errors.Join(t.kernel.stop(d), t.user.stop(d))
}

func (t handOverTier) close(d time.Duration) {
	t.kernel.close(d)
	t.user.close(d)
}

func (t handOverTier) Stats() spin.ContextStats {
	s, user := t.kernel.Stats(), t.user.Stats()
	user.Unverified = 0 // the kernel has counted all packets before it handed some over
	s.Add(&user)
	return s
}

func (t handOverTier) Messages() (spin.MessageStats, bool) {
	s, ok := t.kernel.Messages()
	user, _ := t.user.Messages()
	s.Add(&user)
	return s, ok
}

func (t handOverTier) hpuTime() time.Duration { return t.user.hpuTime() }
func (t handOverTier) Stopped() bool          { return t.user.Stopped() }
func (t handOverTier) Stuck() int             { return t.user.Stuck() }
func (t handOverTier) Packets() []uint64      { return t.kernel.Packets() }

// ownMaps implements mapped.
func (t handOverTier) ownMaps() ([]spin.OwnMap, error) { return t.kernel.ownMaps() }

func (t handOverTier) SetTap(tap hpu.Tap) { t.user.SetTap(tap) }

// kernelBinder has messages that were handed over take the receives of those that are not.
type kernelBinder struct {
	spec     *ContextSpec
	handlers *loader.Handlers
	queue    eventQueue // nil: nobody is told
}

// Bind implements hpu.Binder.
func (b kernelBinder) Bind(m *hpu.Message) (to spin.Binding, err error) {
	if b.queue != nil {
		to.Events = b.queue
	}
	q, ok, ever := b.handlers.Take(m.Number())
	switch all := b.spec.messageWindows(); {
	case ok:
		to.Window, to.Place, to.Size = all[q.Window].Window, q.Place, q.Size
		if q.User != 0 {
			to.User = q.User
		}
	case ever:
		return to, fmt.Errorf("message %d from %v: %w", m.Number(), m.Source(), hpu.ErrNoReceive)
	default:
		for _, w := range all {
			if w.Window.(*hostq.Window).Rights()&spin.Write != 0 { // see resolveMessages
				to.Window = w.Window
				break
			}
		}
	}
	return to, nil
}

// Unbind implements hpu.Binder.
func (b kernelBinder) Unbind(*hpu.Message, *spin.Result) {}
