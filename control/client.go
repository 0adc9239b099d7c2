// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"io"
)

// A Client talks to a daemon. Its methods are safe for concurrent use; their errors
// carry what the daemon said.
type Client struct{}

// Dial returns a client for the daemon at a socket, "" for XSPIN_SOCKET or Socket. It
// fails at once, with a hint, if nobody listens or may not be asked.
func Dial(socket string) (*Client, error) { panic("not yet") }

// Status asks for the daemon's status.
func (c *Client) Status(ctx context.Context) (*Status, error) { panic("not yet") }

// Stats asks for the counters of all interfaces: *into is a []nic.Stats, or whatever
// the same JSON fits into.
func (c *Client) Stats(ctx context.Context, into any) error { panic("not yet") }

// Contexts asks for all contexts.
func (c *Client) Contexts(ctx context.Context) ([]ContextInfo, error) { panic("not yet") }

// Context asks for one.
func (c *Client) Context(ctx context.Context, name string) (*ContextInfo, error) { panic("not yet") }

// Install installs a context.
func (c *Client) Install(ctx context.Context, spec *Context) (*ContextInfo, error) { panic("not yet") }

// Activate arms a context's rulesets.
func (c *Client) Activate(ctx context.Context, name string) error { panic("not yet") }

// Deactivate disarms them; the context stays.
func (c *Client) Deactivate(ctx context.Context, name string) error { panic("not yet") }

// Remove takes a context away.
func (c *Client) Remove(ctx context.Context, name string) error { panic("not yet") }

// Trigger activates a host-activated context.
func (c *Client) Trigger(ctx context.Context, name string, t Trigger) error { panic("not yet") }

// ReadMemory copies HPU memory to w: of the context, or with hpu >= 0 of an HPU.
// length 0: to the end.
func (c *Client) ReadMemory(ctx context.Context, name string, hpu int, offset, length int64, w io.Writer) (int64, error) {
	panic("not yet")
}

// WriteMemory copies r to HPU memory. What does not fit is an error, and nothing is written.
func (c *Client) WriteMemory(ctx context.Context, name string, hpu int, offset int64, r io.Reader) (int64, error) {
	panic("not yet")
}

// Log calls f for each line of a context's log, of one HPU if hpu >= 0; with follow,
// until ctx ends.
func (c *Client) Log(ctx context.Context, name string, hpu int, follow bool, f func(LogLine) error) error {
	panic("not yet")
}

// Capture copies frames of a context to w as pcapng, until ctx ends or count frames
// (0: any number) were written.
func (c *Client) Capture(ctx context.Context, name string, o CaptureOptions, w io.Writer) error {
	panic("not yet")
}

// CaptureOptions say what to capture.
type CaptureOptions struct {
	Filter  string `json:"filter,omitempty"`  // rulesets in text form: frames that match any
	Verdict string `json:"verdict,omitempty"` // only frames with this verdict
	HPU     int    `json:"hpu"`               // only of this HPU, -1 for all
	Snap    int    `json:"snap,omitempty"`    // bytes of each frame, 0 for all
	Count   int    `json:"count,omitempty"`
}

// Reload has the daemon read its configuration file again, and returns what changed.
func (c *Client) Reload(ctx context.Context) (changes []string, err error) { panic("not yet") }
