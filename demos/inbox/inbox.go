// SPDX-License-Identifier: Apache-2.0

// Package inbox is an application that needs no privileges: it attaches to one of the
// daemon's contexts, and takes the messages that handlers put into its window. It also
// answers handlers' requests.
package inbox

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/spin"
)

// Config of an inbox.
type Config struct {
	Socket  string // of the daemon. Defaults to XSPIN_SOCKET, or control.Socket
	Context string
	Slots   int    // parts of the window, each for a message. Defaults to 8
	Dir     string // where messages become files. Optional
	Count   int    // messages and requests after which to end. 0: never
}

// A Message is a message that has ended.
type Message struct {
	Source  netip.AddrPort `json:"source"`
	Number  uint32         `json:"number"`
	Bytes   uint64         `json:"bytes"`             // if its end is missing: up to the last that arrived
	Missing uint64         `json:"missing,omitempty"` // of these
	SHA256  string         `json:"sha256,omitempty"`
	File    string         `json:"file,omitempty"`
	Error   string         `json:"error,omitempty"` // why it is not complete
}

// A Request is a request that was answered, with its payload in upper case.
type Request struct {
	Tag     uint64 `json:"tag"`
	Payload []byte `json:"payload"`
}

// A Notification is what a handler has told, and wants no answer to.
type Notification struct {
	Tag     uint64    `json:"tag"`
	Words   [2]uint64 `json:"words"`
	Payload []byte    `json:"payload,omitempty"`
}

// Report is told what comes.
type Report interface {
	Attached(context string, slots int, size int64) // size of a slot; 0 slots: no window
	Message(Message)
	Request(Request)
	Notification(Notification)
	Lost(events uint64) // events of messages, because the inbox was too slow
	Refused(r Refused)  // since it was told last
}

// Refused are packets of messages for which the inbox had no slot.
type Refused struct {
	Packets uint64 // those that were sent again are counted again
	Slots   int    // all of them were in use
	Size    int64  // of a slot
}

// inbox is an attached application.
type inbox struct {
	cfg    Config
	app    *client.App
	window *client.Window // nil if there is none
	slot   int64          // bytes of a slot
	report Report
	left   int // how much of Config.Count is left

	refused uint64    // that was told
	asked   time.Time // for refusals, last
}

// patience is how long refusals may stay untold: no event brings them.
const patience = time.Second

var errEnough = errors.New("enough")

// Run takes messages and answers requests until ctx ends, or Count is reached.
func Run(ctx context.Context, cfg Config, report Report) (err error) {
	if cfg.Slots == 0 {
		cfg.Slots = 8
	}
	app, err := client.Attach(ctx, cfg.Context, client.Options{Socket: cfg.Socket})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, app.Close()) }()
	in := &inbox{cfg: cfg, app: app, report: report, left: cfg.Count}
	if err := in.open(ctx); err != nil {
		return err
	}
	if err := in.serve(ctx); err != nil {
		return err
	}
	// A last look, though ctx may have ended; all messages are here.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	_ = in.refusals(last)
	return nil
}

func (in *inbox) serve(ctx context.Context) error {
	for {
		if err := in.take(ctx); errors.Is(err, errEnough) {
			in.rest()
			return nil
		} else if err != nil {
			return err
		}
		if time.Since(in.asked) >= patience {
			if err := in.refusals(ctx); err != nil && ctx.Err() == nil {
				return err
			}
		}
		wait, cancel := context.WithTimeout(ctx, patience)
		err := in.app.Wait(wait)
		cancel()
		if ctx.Err() != nil {
			return nil
		} else if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
	}
}

// refusals reports packets that were refused since the last call. There was no slot, unless
// the context may have fewer messages in flight than there are slots.
func (in *inbox) refusals(ctx context.Context) error {
	if in.window == nil {
		return nil
	}
	info, err := in.app.Info(ctx)
	if err != nil {
		return err
	}
	in.asked = time.Now()
	if m := info.MessageStats; m != nil && m.Refused != in.refused {
		if m.Refused > in.refused && (info.Messages == 0 || info.Messages >= in.cfg.Slots) {
			in.report.Refused(Refused{m.Refused - in.refused, in.cfg.Slots, in.slot})
		}
		in.refused = m.Refused // less, if the context has started over
	}
	return nil
}

// open posts a receive for each slot of the window. Then it activates the context, if that
// was left to the application (activate: manual), so that no message arrives before.
func (in *inbox) open(ctx context.Context) error {
	if in.app.Host() == nil {
		return fmt.Errorf("context %q has no queue, so no event and no request ever comes: its configuration gives it one with `queue: {}`", in.cfg.Context)
	}
	if all := in.app.Windows(); len(all) > 0 {
		in.window = all[0]
		in.slot = in.window.Size() / int64(in.cfg.Slots)
		if in.slot == 0 {
			return fmt.Errorf("window %q of %d bytes has no room for %d messages", in.window.Name(), in.window.Size(), in.cfg.Slots)
		}
		for i := range in.cfg.Slots {
			if err := in.post(ctx, uint64(i+1)); err != nil {
				return err
			}
		}
	}
	info, err := in.app.Info(ctx)
	if err != nil {
		return err
	}
	if info.State == "installed" {
		if err := in.app.Activate(ctx); err != nil {
			return err
		}
	}
	if info.MessageStats != nil {
		in.refused = info.MessageStats.Refused // before this inbox was here
	}
	slots := in.cfg.Slots
	if in.window == nil {
		slots = 0
	}
	in.report.Attached(in.cfg.Context, slots, in.slot)
	return nil
}

// post posts a receive for the next message in a slot. The slot's number, 1 and up, comes
// back with the message's event.
func (in *inbox) post(ctx context.Context, slot uint64) error {
	return in.app.Post(ctx, control.Receive{
		Window: in.window.Name(), Place: in.place(slot), Size: in.slot,
		Ignore: ^uint32(0), // any message
		User:   slot,
	})
}

func (in *inbox) place(slot uint64) int64 { return int64(slot-1) * in.slot }

// take takes the requests and events that are there.
func (in *inbox) take(ctx context.Context) error {
	var e hostq.Event
	for in.app.Event(&e) {
		if err := in.event(ctx, &e); err != nil {
			return err
		}
	}
	var r hostq.Call
	for in.app.Request(&r) {
		// The NIC's side could change the payload between two reads, so copy it.
		payload := bytes.Clone(r.Payload)
		if !r.Reply {
			in.notification(&r, payload)
			continue
		}
		if err := in.app.Respond(&r, 0, shout(payload)); err != nil {
			return err
		}
		in.report.Request(Request{r.Tag, payload})
		if err := in.counted(); err != nil {
			return err
		}
	}
	return nil
}

func (in *inbox) notification(r *hostq.Call, payload []byte) {
	in.app.Done(r)
	in.report.Notification(Notification{r.Tag, r.Words, payload})
}

// rest reports what was told before the last message ended.
func (in *inbox) rest() {
	var r hostq.Call
	for in.app.Request(&r) {
		if !r.Reply {
			in.notification(&r, bytes.Clone(r.Payload))
		}
	}
}

// shout returns an answer that is as long as the request, and so fits in its place: it
// changes ASCII letters only. Others may be longer in upper case.
func shout(payload []byte) []byte {
	loud := bytes.Clone(payload)
	for i, c := range loud {
		if 'a' <= c && c <= 'z' {
			loud[i] = c - 'a' + 'A'
		}
	}
	return loud
}

func (in *inbox) event(ctx context.Context, e *hostq.Event) error {
	switch e.Kind {
	case hostq.ContextFault:
		return fmt.Errorf("context %q runs no handlers any more: %s", in.cfg.Context, e.Text)
	case hostq.Overflow:
		// The slots of lost events are unknown, so they stay in use.
		in.report.Lost(e.Lost)
		return nil
	case hostq.MessageEnded, hostq.MessageFailed:
	default:
		return nil // an event of a later version
	}
	m := Message{Source: e.Source, Number: e.Number, Bytes: e.Length}
	mine := in.window != nil && e.User >= 1 && e.User <= uint64(in.cfg.Slots)
	switch {
	case e.Kind == hostq.MessageFailed:
		// Missing stays 0: what had not arrived when it failed is of no use.
		m.Error = e.Text
		if mine && e.Length > uint64(in.slot) { // which may be why, or not: the handler has its own reasons
			m.Error += fmt.Sprintf("; it is longer than a slot of %d bytes: choose fewer slots, or a larger window", in.slot)
		}
	case spin.Cause(e.Cause) != spin.Complete:
		m.Error, m.Missing = spin.Cause(e.Cause).String(), e.Missing
	case mine:
		if err := in.keep(&m, e.User); err != nil {
			return err
		}
	}
	if mine {
		if err := in.post(ctx, e.User); err != nil {
			return err
		}
	}
	in.report.Message(m)
	return in.counted()
}

// keep copies a message out of its slot, which can then be posted again.
func (in *inbox) keep(m *Message, slot uint64) error {
	if m.Bytes > uint64(in.slot) {
		return fmt.Errorf("message %d from %v has %d bytes, in a slot of %d", m.Number, m.Source, m.Bytes, in.slot)
	}
	content := make([]byte, m.Bytes)
	if _, err := in.window.ReadAt(content, in.place(slot)); err != nil {
		return err
	}
	sum := sha256.Sum256(content)
	m.SHA256 = hex.EncodeToString(sum[:])
	if in.cfg.Dir == "" {
		return nil
	}
	m.File = filepath.Join(in.cfg.Dir, fmt.Sprintf("%v-%d-%d", m.Source.Addr(), m.Source.Port(), m.Number))
	return os.WriteFile(m.File, content, 0o644)
}

func (in *inbox) counted() error {
	if in.left--; in.left == 0 {
		return errEnough
	}
	return nil
}
