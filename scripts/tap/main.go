// SPDX-License-Identifier: Apache-2.0

// Command tap runs compiled Go tests, one package after the other, and reports them as
// the kernel's selftests do: a line of TAP for each test, skips with their reason, and
// what a test printed only if it failed.
//
//	tap TEST2JSON DIR=BINARY[=TESTS]... [-- FLAG...]
//
// TEST2JSON is the tool of that name (go build cmd/test2json). A binary runs in the
// folder of its package, with the flags: all of its tests or, without -test.run among the
// flags, those that the regular expression TESTS names. The exit status is 1 if a test failed, or a
// binary ended in another way than by its tests.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

func main() {
	args, flags := os.Args[1:], []string(nil)
	if i := slices.Index(args, "--"); i >= 0 {
		args, flags = args[:i], args[i+1:]
	}
	if len(args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: tap TEST2JSON DIR=BINARY[=TESTS]... [-- FLAG...]")
		os.Exit(2)
	}
	out := &report{w: os.Stdout, count: map[string]int{}}
	fmt.Fprintln(out.w, "TAP version 13")
	for _, arg := range args[1:] {
		dir, binary, tests, ok := split(arg)
		if !ok {
			fmt.Fprintf(os.Stderr, "tap: %q is not DIR=BINARY[=TESTS]\n", arg)
			os.Exit(2)
		}
		if err := run(out, args[0], dir, binary, append([]string{"-test.run", tests}, flags...)); err != nil {
			out.line(dir+" could not be run", "fail", 0, []string{err.Error()})
		}
	}
	fmt.Fprintf(out.w, "1..%d\n# %d passed, %d failed, %d skipped\n", out.n, out.count["pass"], out.count["fail"], out.count["skip"])
	if out.count["fail"] > 0 || out.n == 0 {
		os.Exit(1)
	}
}

// split takes DIR=BINARY[=TESTS] apart.
func split(arg string) (dir, binary, tests string, ok bool) {
	dir, binary, ok = strings.Cut(arg, "=")
	binary, tests, _ = strings.Cut(binary, "=")
	return dir, binary, tests, ok
}

// run runs one binary and reports its tests.
func run(out *report, test2json, dir, binary string, flags []string) error {
	abs, err := filepath.Abs(binary)
	if err != nil {
		return err
	}
	if test2json, err = filepath.Abs(test2json); err != nil {
		return err
	}
	c := exec.Command(test2json, append([]string{"-t", abs, "-test.v=test2json"}, flags...)...)
	c.Dir, c.Stderr, c.WaitDelay = dir, os.Stderr, 10*time.Second
	events, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	err = parse(out, dir, events)
	var status *exec.ExitError // told by the events
	if e := c.Wait(); !errors.As(e, &status) {
		err = errors.Join(err, e)
	}
	return err
}

// An event of go doc test2json.
type event struct {
	Action, Test, Output string
	Elapsed              float64 // seconds
}

// parse reports the tests of one package.
func parse(out *report, dir string, events io.Reader) error {
	said := map[string][]string{} // by top-level test; "" is the package
	failed, ended := 0, false
	for d := json.NewDecoder(events); ; {
		var e event
		switch err := d.Decode(&e); {
		case errors.Is(err, io.EOF) && (ended || failed > 0): // a panic is the last event of its test
			return nil
		case err != nil:
			return fmt.Errorf("events of %s: %w", dir, err)
		}
		top, _, sub := strings.Cut(e.Test, "/")
		switch e.Action {
		case "output":
			if line := strings.TrimSpace(e.Output); !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- PASS: ") {
				said[top] = append(said[top], strings.TrimRight(e.Output, "\n"))
			}
		case "pass", "fail", "skip":
			if sub {
				continue
			}
			if top == "" {
				// The package as a whole fails with its tests, or else by itself.
				if ended = true; e.Action == "fail" && failed == 0 {
					out.line(dir, "fail", e.Elapsed, said[""])
				}
				continue
			}
			if e.Action == "fail" {
				failed++
			}
			out.line(dir+" "+top, e.Action, e.Elapsed, said[top])
			delete(said, top)
		}
	}
}

type report struct {
	w     io.Writer
	n     int
	count map[string]int // by verdict: pass, fail or skip
}

// line reports a test, or a package. What it said is shown if it failed; the reason
// of a skip is in it.
func (r *report) line(name, verdict string, seconds float64, said []string) {
	r.n++
	r.count[verdict]++
	switch verdict {
	case "skip":
		fmt.Fprintf(r.w, "ok %d %s # SKIP %s\n", r.n, name, reason(said))
	case "pass":
		fmt.Fprintf(r.w, "ok %d %s # %.1f s\n", r.n, name, seconds)
	default:
		fmt.Fprintf(r.w, "not ok %d %s # %.1f s\n", r.n, name, seconds)
		const most = 200
		if n := len(said); n > most {
			said = slices.Concat(said[:most/2], []string{fmt.Sprintf("... %d lines", n-most)}, said[n-most/2:])
		}
		for _, l := range said {
			fmt.Fprintln(r.w, "#", l)
		}
	}
}

// reason finds what Skip said: "    file_test.go:12: reason".
func reason(said []string) string {
	for _, l := range slices.Backward(said) {
		if _, after, ok := strings.Cut(l, ".go:"); ok {
			if _, text, ok := strings.Cut(after, ": "); ok {
				return text
			}
		}
	}
	return "without a reason"
}
