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
)

func main() {
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
		status, err := os.ReadFile("/proc/self/task/" + t.Name() + "/status")
		if err != nil {
			continue // it has ended
		}
		var all []string
		for line := range strings.Lines(string(status)) {
			for _, key := range []string{"Uid:", "CapEff:", "CapPrm:", "CapInh:", "CapBnd:", "CapAmb:", "NoNewPrivs:"} {
				if v, ok := strings.CutPrefix(line, key); ok {
					all = append(all, key+strings.Fields(v)[0])
				}
			}
		}
		sets[strings.Join(all, " ")] = true
	}
	var out []string
	for s := range sets {
		out = append(out, s)
	}
	return strings.Join(out, " | ")
}
