// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"os/signal"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/demos/inbox"
	"github.com/xspin/xspin/internal/flags"
)

// newInboxCmd returns `xspin demo inbox`.
func newInboxCmd() *cobra.Command {
	var cfg inbox.Config
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "inbox [CONTEXT]",
		Short: "An application of the daemon: takes messages, answers requests",
		Long: `Attach to a context of the daemon (xspin run), "inbox" if left out, and print what
arrives: messages that its handlers put into the window; requests, which are answered in
upper case; and what handlers tell without asking (xspin_notify, Task.Notify). The window has --slots parts for one message each; a message that is longer
than a part fails. This needs no privileges: the context's key attach says who may attach.

The daemon's configuration has, for example:

  contexts:
    - name: inbox
      handler: deposit
      windows: [{name: in, size: 64MiB}]
      attach: {users: [alice]}
      activate: manual          # this application does it, when it is ready
    - name: shout
      handler: requests
      params: {port: 5000}
      attach: {users: [alice]}`,
		Example: `  xspin demo inbox --dir /tmp/in
  xspin demo inbox shout
  xspin send --to 10.0.0.1 FILE   # from elsewhere`,
		Args: wantArgs("[CONTEXT]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Context = "inbox"
			if len(args) == 1 {
				cfg.Context = args[0]
			}
			switch {
			case cfg.Slots < 1 || cfg.Slots > 1024:
				return flags.Error("slots", cfg.Slots, "want 1 to 1024")
			case cfg.Count < 0:
				return flags.Error("count", cfg.Count, "want 1 or more, or 0 for no end")
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
			defer stop()
			if !asJSON {
				return inboxError(inbox.Run(ctx, cfg, inboxLines{cmd.OutOrStdout()}))
			}
			doc := inboxDocument{Schema: 1, Messages: []inbox.Message{}, Requests: []inbox.Request{}, Notifications: []inbox.Notification{}, said: inboxLines{cmd.ErrOrStderr()}}
			if err := inbox.Run(ctx, cfg, &doc); err != nil {
				return inboxError(err)
			}
			return writeJSON(cmd.OutOrStdout(), &doc)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&cfg.Socket, "socket", "", "socket of the daemon (default XSPIN_SOCKET, or "+control.Socket+")")
	fl.StringVar(&cfg.Dir, "dir", "", "write messages to files in this directory")
	fl.IntVar(&cfg.Slots, "slots", 8, "parts of the window, each for one message")
	fl.IntVar(&cfg.Count, "count", 0, "end after this many messages and requests (default: when interrupted)")
	fl.BoolVar(&asJSON, "json", false, "print one JSON document, at the end")
	return cmd
}

func inboxError(err error) error {
	if err != nil {
		err = fmt.Errorf("demo inbox: %w", err)
	}
	return err
}

// inboxLines is an inbox.Report for people.
type inboxLines struct{ w io.Writer }

func (l inboxLines) Attached(context string, slots int, size int64) {
	what := "requests"
	if slots > 0 {
		what = fmt.Sprintf("messages, in %s of %s", count(slots, "slot"), file.Bytes(size))
	}
	fmt.Fprintf(l.w, "attached to %s: waiting for %s\n", context, what)
}

func (l inboxLines) Message(m inbox.Message) {
	switch {
	case m.Missing > 0:
		fmt.Fprintf(l.w, "message %d from %v: %s (%s of the first %s missing)\n", m.Number, m.Source, m.Error, file.Bytes(m.Missing), file.Bytes(m.Bytes))
	case m.Error != "":
		fmt.Fprintf(l.w, "message %d from %v: %s\n", m.Number, m.Source, m.Error)
	case m.File != "":
		fmt.Fprintf(l.w, "message %d from %v: %s, sha256 %.16s…, %s\n", m.Number, m.Source, file.Bytes(m.Bytes), m.SHA256, m.File)
	default:
		fmt.Fprintf(l.w, "message %d from %v: %s, sha256 %.16s…\n", m.Number, m.Source, file.Bytes(m.Bytes), m.SHA256)
	}
}

// shownOfRequest is how many bytes of a request are shown.
const shownOfRequest = 64

func (l inboxLines) Request(r inbox.Request) {
	fmt.Fprintf(l.w, "request %#x: %s, answered\n", r.Tag, beginning(r.Payload))
}

func (l inboxLines) Notification(n inbox.Notification) {
	fmt.Fprintf(l.w, "notification %#x: %d %d", n.Tag, n.Words[0], n.Words[1])
	if len(n.Payload) > 0 {
		fmt.Fprintf(l.w, ", %s", beginning(n.Payload))
	}
	fmt.Fprintln(l.w)
}

// beginning is what is shown of a payload.
func beginning(payload []byte) string {
	if len(payload) > shownOfRequest {
		return fmt.Sprintf("%q… of %s", payload[:shownOfRequest], file.Bytes(uint64(len(payload))))
	}
	return fmt.Sprintf("%q", payload)
}

func (l inboxLines) Lost(events uint64) {
	fmt.Fprintf(l.w, "%s lost: they came faster than they were taken\n", count(int(events), "event"))
}

func (l inboxLines) Refused(r inbox.Refused) {
	slots := fmt.Sprintf("the only slot, of %s, was", file.Bytes(r.Size))
	if r.Slots > 1 {
		slots = fmt.Sprintf("all %d slots of %s were", r.Slots, file.Bytes(r.Size))
	}
	fmt.Fprintf(l.w, "%s refused: %s in use; for more messages at a time raise --slots, and the window's size if these become too small\n", count(int(r.Packets), "packet"), slots)
}

// inboxDocument is an inbox.Report for programs.
type inboxDocument struct {
	Schema        int                  `json:"schema"`
	Messages      []inbox.Message      `json:"messages"`
	Requests      []inbox.Request      `json:"requests"`
	Notifications []inbox.Notification `json:"notifications"`
	Missed        uint64               `json:"lost"`    // events
	Turned        uint64               `json:"refused"` // packets

	said inboxLines
}

func (d *inboxDocument) Attached(context string, slots int, size int64) {
	d.said.Attached(context, slots, size)
}
func (d *inboxDocument) Message(m inbox.Message) { d.Messages = append(d.Messages, m) }
func (d *inboxDocument) Request(r inbox.Request) { d.Requests = append(d.Requests, r) }
func (d *inboxDocument) Notification(n inbox.Notification) {
	d.Notifications = append(d.Notifications, n)
}
func (d *inboxDocument) Lost(events uint64) { d.Missed += events }
func (d *inboxDocument) Refused(r inbox.Refused) {
	d.Turned += r.Packets
	d.said.Refused(r)
}
