// SPDX-License-Identifier: Apache-2.0

package pingpong

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/xspin/xspin/client"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/demos/attached"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/spin"
)

// Mode HostNIC. The work is shared: handlers swap the addresses, the application
// computes the checksum, and a continuation of the handler puts it in and sends.

// The handlers are those of the set "echo-host", with time measurements. The daemon
// makes them by name. A process may have several contexts of them, one at a time.
const handlerSet = "demo-pingpong"

var (
	register = sync.OnceFunc(func() {
		handlers.Register(handlerSet, "the demo's: answers pings with checksums that the application computes; param protos", newSet)
	})
	timing = map[rtt.Proto]*samples{rtt.ICMP: {asks: true}, rtt.UDP: {asks: true}}
)

func newSet(p handlers.Params) (*handlers.Set, error) {
	var c struct {
		Protos []string `param:"protos,required"`
	}
	if err := p.Decode(&c); err != nil {
		return nil, err
	}
	s := &handlers.Set{Handlers: hpu.Handlers{Payload: ask}, Queue: true, Timestamp: true}
	if slices.Contains(c.Protos, string(rtt.ICMP)) {
		s.Rulesets = append(s.Rulesets, matcher.ICMPEcho())
	}
	if slices.Contains(c.Protos, string(rtt.UDP)) {
		s.Rulesets = append(s.Rulesets, matcher.UDPPort(Port))
	}
	return s, nil
}

// ask turns a packet into the reply and asks for its checksum. The tag is the time.
func ask(h *hpu.HER) spin.Code {
	start := h.Now()
	hdr := h.Headers()
	if !hdr.Hop() || !hdr.Turn() {
		return spin.Drop
	}
	s := timing[rtt.ICMP]
	if hdr.UDP != nil {
		s = timing[rtt.UDP]
	}
	asked := h.Now()
	if h.AskThen(uint64(asked), h.Head(), finish) != nil {
		return spin.Drop
	}
	// The rest of the handler runs in parallel with the application.
	s.handler.add(asked - start)
	if at := h.Arrival(); at != 0 {
		s.arrival.add(start - at)
	}
	return spin.Success
}

// finish gets the application's answer.
func finish(h *hpu.HER, r *hpu.Reply) spin.Code {
	start := h.Now()
	if r.Err != nil || r.Status != 0 || len(r.Payload) != 2 {
		return spin.Drop
	}
	hdr, sum := h.Headers(), binary.BigEndian.Uint16(r.Payload)
	s := timing[rtt.ICMP]
	if hdr.UDP != nil {
		hdr.UDP.SetChecksum(sum)
		s = timing[rtt.UDP]
	} else {
		hdr.ICMP.SetChecksum(sum)
	}
	if h.Send() != nil {
		return spin.Drop
	}
	s.host.add(start - int64(r.Tag))
	s.rest.add(h.Now() - start)
	return spin.Success
}

// shared is a NIC and an application that answer together.
type shared struct{ *attached.App }

// contextName is the daemon's context.
const contextName = "pingpong"

func startShared(ctx context.Context, lab *netns.Lab, c ServerConfig) (NICServer, error) {
	register()
	var protos []any
	for _, p := range c.Protos {
		protos = append(protos, string(p))
	}
	o := appOptions{Spin: c.AppSpin, CPU: -1}
	if len(c.CPUs) > 0 {
		o.CPU = c.CPUs[0]
	}
	app, err := attached.Start(ctx, lab, attached.Config{
		Interface: daemon.Interface{HPUs: c.HPUs, Wait: c.Wait, CPUs: c.CPUs},
		Context: control.Context{
			Name:     contextName,
			Handler:  handlerSet,
			Params:   map[string]any{"protos": protos},
			Activate: "attach", // Linux answers until then
		},
		Command: AppCommand,
		Options: o,
	})
	if err != nil {
		return nil, err
	}
	return shared{app}, nil
}

// Breakdown implements NICServer.
func (shared) Breakdown(p rtt.Proto, replies int) Breakdown { return timing[p].take(replies) }

// AppCommand is the hidden command that is the application. The binary hands it to
// Main.
const AppCommand = "_pingpong-app"

// Main runs a hidden command: args as in os.Args[1:]. ok tells whether args are one.
func Main(args []string) (ok bool, err error) {
	if len(args) == 0 || args[0] != AppCommand {
		return false, nil
	}
	var o appOptions
	if len(args) != 2 || json.Unmarshal([]byte(args[1]), &o) != nil {
		return true, fmt.Errorf("%s: this command is for xspin's own use", args[0])
	}
	// The loop keeps a P for ever, and the goroutine that waits for the end of
	// stdin needs one too.
	runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0)))
	debug.SetGCPercent(-1)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	return true, o.run(os.Stdout)
}

type appOptions struct {
	Spin time.Duration `json:"spin"`
	CPU  int           `json:"cpu"` // -1 for any
}

// run is the application.
func (o appOptions) run(ready io.Writer) error {
	ctx := context.Background()
	app, err := client.Attach(ctx, contextName, client.Options{Spin: o.Spin})
	if err != nil {
		return err
	}
	defer app.Close()
	return testbed.OnCPU(o.CPU, func() error {
		if _, err := fmt.Fprintln(ready, "ready"); err != nil {
			return err
		}
		var (
			call hostq.Call
			buf  [2]byte
		)
		for {
			if err := app.Wait(ctx); err != nil {
				return err
			}
			for app.Request(&call) {
				status := int32(0)
				sum, ok := handlers.EchoSum(buf[:0], call.Payload)
				if !ok {
					status = 1
				}
				if err := app.Respond(&call, status, sum); err != nil {
					return err
				}
			}
		}
	})
}
