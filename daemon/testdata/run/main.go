// SPDX-License-Identifier: Apache-2.0

// A daemon in a process of its own, for tests: it does what its stdin says, a line
// each, says so on stdout, and ends with its stdin.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/handlers"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/spin"
)

func main() {
	// Says in the log who it runs as, often if it is told to.
	handlers.Register("say", "", func(handlers.Params) (*handlers.Set, error) {
		return &handlers.Set{Handlers: hpu.Handlers{Payload: func(t *hpu.HER) spin.Code {
			times := 1
			if t.PayloadLen() == len("often") {
				times = 200
			}
			self := capabilitiesOf("thread-self")
			for range times {
				t.Logf("%s%800s", self, ".")
			}
			return spin.Drop
		}}}, nil
	})
	cfg, err := daemon.Load(os.Args[1])
	var d *daemon.Daemon
	if err == nil {
		d, err = daemon.Start(cfg, daemon.Options{File: os.Args[1], Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	}
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	for s := bufio.NewScanner(os.Stdin); s.Scan(); {
		what, arg, _ := strings.Cut(s.Text(), " ")
		switch what {
		case "open":
			f, err := os.Open(arg)
			fmt.Println("opened:", err)
			f.Close()
		case "reload":
			changes, err := d.Reload()
			fmt.Printf("reloaded: %q %v\n", changes, err)
		case "capabilities":
			fmt.Println("capabilities:", capabilities())
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fmt.Println("closed:", d.Close(ctx))
}

// capabilities returns what the threads have, each set once.
func capabilities() string {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err.Error()
	}
	sets := map[string]bool{}
	for _, t := range tasks {
		if set := capabilitiesOf("self/task/" + t.Name()); set != "" {
			sets[set] = true
		}
	}
	var out []string
	for s := range sets {
		out = append(out, s)
	}
	return strings.Join(out, " | ")
}

// capabilitiesOf returns what a thread has, "" when it has ended.
func capabilitiesOf(thread string) string {
	status, err := os.ReadFile("/proc/" + thread + "/status")
	if err != nil {
		return ""
	}
	var all []string
	for line := range strings.Lines(string(status)) {
		for _, key := range []string{"Uid:", "CapEff:", "CapPrm:", "CapInh:", "CapBnd:", "CapAmb:", "NoNewPrivs:"} {
			if v, ok := strings.CutPrefix(line, key); ok {
				all = append(all, key+strings.Fields(v)[0])
			}
		}
	}
	return strings.Join(all, " ")
}
