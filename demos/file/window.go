// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/demos/attached"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/spin"
)

// The receiver that is an application. Handlers put each message into its window, in
// the place of a receive that the application has posted, and an event tells it of the
// message's end. It writes a file and posts the place again. It has no privileges, and
// sees no packets.

const (
	contextName = "file"
	windowName  = "in"
)

// mostWindow is the largest window, unless a single place takes more. If there are more
// messages than places, the NIC refuses some, and their senders try again.
const mostWindow = 2 << 30

// Handlers in eBPF take as many messages at a time, of at least so many segments.
const (
	kernelMessages = 64
	kernelSegments = 1 << 18
	shortest       = 1024 // bytes of a segment, at least, of a message that is longer than that
)

// windowServer is a daemon and the application.
type windowServer struct {
	*attached.App
	wire  io.Closer     // nil: handlers in Go answer
	slots int           // places in the window
	heard chan struct{} // closed when all that the application reports was read
	err   error         // set before heard is closed
}

// startWindow starts a NIC on the lab's NIC end, with an application that receives.
func startWindow(ctx context.Context, lab *netns.Lab, c ServerConfig) (*windowServer, error) {
	dir, err := filepath.Abs(c.Store.Dir) // the application may not be able to reach our working directory
	if err != nil {
		return nil, err
	}
	o := appOptions{Dir: dir, Size: c.Store.MaxSize, Sync: c.Store.Sync}
	o.Places = int(max(min(int64(c.Places), mostWindow/o.Size, backlog, int64(mostLive())), 1))
	size := control.Size(o.Size * int64(o.Places))
	receiver := control.Context{
		Name:     contextName,
		Handler:  "deposit",
		Windows:  []control.Window{{Name: windowName, Size: size}},
		Queue:    &control.Queue{Events: 1 << bits.Len(uint(2*o.Places))},
		Timeout:  control.Duration(c.Store.Timeout),
		Activate: "manual", // by the application, when it has posted receives
	}
	s := &windowServer{slots: o.Places, heard: make(chan struct{})}
	if c.Into == IntoXDP || c.Into == IntoTC {
		receiver.Tier, receiver.Hook, receiver.Messages = "kernel", string(c.Into), kernelMessages
		receiver.Segments = int(max(o.Size/shortest, kernelSegments))
	}
	if c.Into == IntoXDP {
		if s.wire, err = lab.Host.Wire(); err != nil { // or the answers arrive nowhere
			return nil, err
		}
	}
	s.App, err = attached.Start(ctx, lab, attached.Config{
		Interface: daemon.Interface{HPUs: c.HPUs, Wait: c.Wait, CPUs: c.CPUs},
		Limits:    daemon.Limits{Window: size, Memory: size + 1<<30},
		Context:   receiver,
		Command:   AppCommand,
		Options:   o,
	})
	if err != nil {
		return nil, errors.Join(err, s.unwire())
	}
	go s.listen(c.Store.Ended)
	return s, nil
}

// listen reads what the application reports, and calls ended for each message.
func (s *windowServer) listen(ended func(Received)) {
	defer close(s.heard)
	for d := json.NewDecoder(s.Out); ; {
		var t told
		switch err := d.Decode(&t); {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			s.err = fmt.Errorf("what the application says: %w", err)
			return
		}
		ended(t.received())
	}
}

func (s *windowServer) places() int { return s.slots }

func (s *windowServer) unverified() (uint64, error) {
	c, err := control.Dial(s.Socket)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	i, err := c.Context(context.Background(), contextName)
	if err != nil {
		return 0, err
	}
	return i.HandlerStats.Unverified, nil
}

// Close ends messages that are in flight, and reports all that have ended.
func (s *windowServer) Close() error {
	s.End()
	<-s.heard
	return errors.Join(s.err, s.App.Close(), s.unwire())
}

func (s *windowServer) unwire() error {
	if s.wire == nil {
		return nil
	}
	return s.wire.Close()
}

// told is a Received on its way through a pipe.
type told struct {
	Source netip.AddrPort `json:"source"`
	Number uint32         `json:"number"`
	Path   string         `json:"path"`
	Bytes  uint64         `json:"bytes"`
	SHA256 string         `json:"sha256"`
	Err    string         `json:"err"`
}

func (t told) received() Received {
	r := Received{Source: t.Source, Number: t.Number, Path: t.Path, Bytes: t.Bytes, SHA256: t.SHA256}
	if t.Err != "" {
		r.Err = errors.New(t.Err)
	}
	return r
}

// AppCommand is the hidden command that is the application. The binary hands it to
// Main.
const AppCommand = "_file-app"

// Main runs a hidden command: args as in os.Args[1:]. ok tells whether args are one.
func Main(args []string) (ok bool, err error) {
	if len(args) == 0 || args[0] != AppCommand {
		return false, nil
	}
	var o appOptions
	if len(args) != 2 || json.Unmarshal([]byte(args[1]), &o) != nil {
		return true, fmt.Errorf("%s: this command is for xspin's own use", args[0])
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return true, o.run(ctx, os.Stdout)
}

type appOptions struct {
	Dir    string `json:"dir"`
	Size   int64  `json:"size"`   // of a place: no file is longer
	Places int    `json:"places"` // in the window
	Sync   bool   `json:"sync"`
}

// application receives files.
type application struct {
	appOptions
	app    *client.App
	memory []byte // the window
	store  *Store
	// taken has the places of messages that the store is still dealing with. It
	// has room for all places. A place is posted again when the store is done.
	taken chan uint64
	lost  chan error // why a place was not posted again
}

// run is the application, until ctx ends.
func (o appOptions) run(ctx context.Context, out io.Writer) (err error) {
	a := &application{appOptions: o, taken: make(chan uint64, o.Places), lost: make(chan error, 1)}
	if a.app, err = client.Attach(ctx, contextName, client.Options{}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.app.Close()) }()
	a.memory = a.app.Window(windowName).Bytes()
	w := bufio.NewWriter(out)
	say := json.NewEncoder(w)
	if a.store, err = OpenStore(StoreConfig{Dir: o.Dir, MaxSize: o.Size, Prepare: -1, Sync: o.Sync, Ended: func(r Received) {
		t := told{r.Source, r.Number, r.Path, r.Bytes, r.SHA256, ""}
		if r.Err != nil {
			t.Err = r.Err.Error()
		}
		_ = say.Encode(t)
		_ = w.Flush() // it fails only if the demo does not read any more
		if err := a.post(ctx, <-a.taken); err != nil && ctx.Err() == nil {
			select {
			case a.lost <- err:
			default:
			}
		}
	}}); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: the application is user %d: choose a directory that it may write to", err, os.Getuid())
		}
		return err
	}
	defer func() { err = errors.Join(err, a.store.Close()) }()
	for i := range o.Places {
		if err := a.post(ctx, uint64(i)); err != nil {
			return err
		}
	}
	if err := a.app.Activate(ctx); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	for {
		switch err := a.app.Wait(ctx); {
		case ctx.Err() != nil:
			return a.takeRest(ctx)
		case err != nil:
			return err
		}
		if err := a.takeAll(); err != nil {
			return err
		}
	}
}

// post posts a receive for any message at a place.
func (a *application) post(ctx context.Context, place uint64) error {
	return a.app.Post(ctx, control.Receive{Window: windowName, Place: int64(place) * a.Size, Size: a.Size, Ignore: ^uint32(0), User: place})
}

// leaveWait is how long the daemon may take to disarm the context.
const leaveWait = 2 * time.Second

// takeRest makes files of all that was acknowledged before the end: a context that is not
// active any more has told of it. A NIC that is gone has nothing to tell.
func (a *application) takeRest(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWait)
	defer cancel()
	_ = a.app.Deactivate(ctx)
	return a.takeAll()
}

// takeAll makes files of the messages that have ended.
func (a *application) takeAll() error {
	var e hostq.Event
	for a.app.Event(&e) {
		switch e.Kind {
		case hostq.MessageEnded, hostq.MessageFailed:
		case hostq.ContextFault:
			return fmt.Errorf("the NIC has stopped the context: %s", e.Text)
		default:
			continue
		}
		if e.User >= uint64(a.Places) || e.Length > uint64(a.Size) && spin.Cause(e.Cause) == spin.Complete {
			return fmt.Errorf("event of a message of %d bytes in place %d: want a place below %d, and at most %d bytes", e.Length, e.User, a.Places, a.Size)
		}
		if err := a.take(&e); err != nil {
			return err
		}
		select {
		case err := <-a.lost:
			return err
		default:
		}
	}
	return nil
}

func (a *application) take(e *hostq.Event) error {
	in, err := a.store.begin(e.Source, e.Number)
	if err != nil {
		return err
	}
	switch {
	case e.Kind == hostq.MessageFailed:
		in.fail(errors.New(strings.TrimSpace(e.Text)))
	case spin.Cause(e.Cause) != spin.Complete:
		in.fail(fmt.Errorf("%v: %s", spin.Cause(e.Cause), spin.Lack(e.Missing, e.Length)))
	default:
		_, err := in.WriteAt(a.memory[int64(e.User)*a.Size:][:e.Length], 0)
		if err == nil {
			err = in.publish(e.Length)
		}
		if err != nil {
			in.fail(err)
		}
	}
	a.taken <- e.User
	a.store.end(in)
	return nil
}
