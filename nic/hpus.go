// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/mpq"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

// hpuTier is the tier whose handlers are Go functions, on the HPUs of the NIC.
type hpuTier struct {
	*hpu.Context
	n *NIC
}

// newTier makes what serves a context. The caller has the lock.
func (n *NIC) newTier(c *Context) (tier, error) {
	s := &c.spec
	if s.Kernel == nil {
		return n.newHPUTier(c, s)
	}
	kernel := &kernelTier{n: n, id: c.id, spec: s, handlers: c.loaded, queue: c.queue}
	if !s.handsOver() {
		return kernel, nil
	}
	theirs := *s
	theirs.Binder = kernelBinder{s, c.loaded, c.queue}
	user, err := n.newHPUTier(c, &theirs)
	return handOverTier{kernel, user}, err
}

func (n *NIC) newHPUTier(c *Context, s *ContextSpec) (_ hpuTier, err error) {
	ctx := hpu.NewContext(c.id, s.Name, s.Handlers, c.buckets)
	if s.Format.Ends() {
		if ctx, err = hpu.NewMessageContext(c.id, s.Name, s.Handlers, c.buckets, s.CoreMask, n.messages(s, c.queue)); err != nil {
			return hpuTier{}, err
		}
	}
	res := s.Resources
	if res.Resolver == nil {
		res.Resolver = n.neigh
	}
	if err := ctx.SetResources(res); err != nil {
		return hpuTier{}, err
	}
	return hpuTier{ctx, n}, nil
}

// messages is what the HPUs are to know of a context's messages, whose ends go to queue unless that is nil.
func (n *NIC) messages(s *ContextSpec, queue eventQueue) hpu.MessageConfig {
	held := s.Held
	if held == 0 {
		// Of its credit: packets that wait must leave some to those that come.
		credit := s.Credits
		if credit == 0 {
			credit = n.cfg.Ring / (len(n.contexts) + 1)
		}
		if held = min(64, credit/4); held == 0 {
			held = -1
		}
	}
	cfg := hpu.MessageConfig{
		Config: mpq.Config{
			Messages: s.Messages, Held: held, Timeout: s.Timeout, Remember: s.Remember,
			Memory: s.Memory, Incomplete: s.Incomplete, Linger: s.Linger,
		},
		Format:    s.Format,
		Protocol:  s.Protocol,
		Binder:    s.Binder,
		Default:   spin.Binding{Window: s.Window},
		State:     s.State,
		Initial:   s.InitialState,
		Checksums: s.Checksums,
		Shared:    s.Policy != ByMessage,
	}
	if s.handsOver() {
		cfg.FirstSlot = s.Messages // those in the kernel are before it
	}
	if queue != nil {
		cfg.Default.Events = queue
		if s.Binder != nil && s.Events == nil {
			cfg.Binder = queueBinder{s.Binder, queue}
		}
	}
	if s.speaksSLMP() {
		cfg.Protocol = slmp.Protocol{}
	}
	return cfg
}

// speaksSLMP tells whether messages of the context are acknowledged as those of SLMP, by
// itself or because somebody says so.
func (s *ContextSpec) speaksSLMP() bool {
	if s.Protocol != nil {
		_, is := s.Protocol.(slmp.Protocol)
		return is
	}
	return s.isFormat("slmp") || s.isFormat("slmp6")
}

// ForgetsEarly tells what comes of a resolved description that has ended messages forgotten
// while senders may still send them again, "" if it does not.
func (s *ContextSpec) ForgetsEarly() string {
	if s.Remember == 0 || s.Remember >= spin.DefaultRemember || !s.speaksSLMP() {
		return ""
	}
	return fmt.Sprintf("senders send a message again for up to %v while no acknowledgement comes: after an outage of more than %v handlers may run a second time for it. Want %v or more, or leave it out",
		slmp.MaxSilence, s.Remember, spin.DefaultRemember)
}

// isFormat tells whether the context has the predefined format of that name.
func (s *ContextSpec) isFormat(name string) bool {
	return reflect.DeepEqual(s.Format, matcher.FormatByName(name))
}

func (t hpuTier) install() error {
	atomic.StoreUint32(&t.n.ingress.Share().Quantum[t.ID()], 1) // until its handlers' time is known
	return t.n.pool.Install(t.Context)
}

func (t hpuTier) arm() error { return t.n.pool.Init(t.Context) }

func (t hpuTier) drain(d time.Duration) error {
	for deadline := time.Now().Add(d); t.waiting() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%d buffers are still in flight after %v: a handler is busy, the application has them, or they are kept", t.waiting(), d)
		}
	}
	return nil
}

// waiting returns how many buffers of the context are out, but for the packets that
// are held until their message begins.
func (t hpuTier) waiting() int {
	held := 0
	if m, ok := t.Messages(); ok {
		held = m.HeldNow
	}
	return t.n.out(t.ID()) - held
}

func (t hpuTier) stop(d time.Duration) error { return t.n.pool.Drain(t.Context, d) }

// close ends open messages; all else ends with the HPUs.
func (t hpuTier) close(d time.Duration) {
	if m, ok := t.Messages(); ok && m.Open > 0 {
		_ = t.stop(d)
	}
}

func (t hpuTier) hpuTime() time.Duration { return t.Stats().HandlerSum }

func (t hpuTier) trigger(g hpu.Trigger) error { return t.n.pool.Trigger(t.Context, g) }
