// SPDX-License-Identifier: Apache-2.0

package nic_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

// transferred are the bytes of a message to the child that deposits.
const transferred = 4 << 20

// childEnv makes the test binary something else: see child.
const childEnv = "XSPIN_NIC_TEST_CHILD"

func TestMain(m *testing.M) {
	if role := os.Getenv(childEnv); role != "" {
		if err := child(role, os.Getenv(childEnv+"_DEVICE")); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child is a process of its own with a NIC: to be killed, or to be left with a
// thread that no Go program can get rid of. It says on stdout what happens and
// ends with its stdin.
func child(role, device string) error {
	cfg := nic.Config{Interface: device}
	if role == "forever" {
		cfg.HPUs = 1
		cfg.Limit = 100 * time.Millisecond
	}
	n, err := nic.Open(cfg)
	if err != nil {
		return err
	}
	specs := []nic.ContextSpec{{Name: "icmp", Rulesets: []matcher.Ruleset{matcher.ICMPEcho()}, Handlers: hpu.Handlers{Payload: echo}}}
	if role == "kernel" {
		o, err := nic.BuiltinObject("echo-icmp")
		if err != nil {
			return err
		}
		specs[0].Handlers, specs[0].Kernel = hpu.Handlers{}, &nic.Kernel{Object: o}
	}
	if role == "deposit" {
		mem, err := hostq.NewMemory("child", transferred)
		if err != nil {
			return err
		}
		o, err := nic.BuiltinObject("deposit")
		if err != nil {
			return err
		}
		specs = []nic.ContextSpec{{Name: "deposit", Hook: nic.HookTC, Rulesets: []matcher.Ruleset{matcher.SLMP()}, Kernel: &nic.Kernel{Object: o}, Window: mem.Whole()}}
	}
	if role == "forever" {
		forever := func(*hpu.HER) spin.Code {
			for { //nolint:staticcheck // the point of the test
			}
		}
		specs = append(specs, nic.ContextSpec{Name: "stuck", Rulesets: []matcher.Ruleset{matcher.UDPPort(9)}, Handlers: hpu.Handlers{Payload: forever}})
	}
	for _, spec := range specs {
		c, err := n.Install(spec)
		if err != nil {
			return err
		}
		if err := n.Activate(c); err != nil {
			return err
		}
	}
	go func() {
		for e := range n.Events() {
			fmt.Println("event:", e)
		}
	}()
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	fmt.Println("closed:", n.Close())
	return nil
}

// A process is a child that runs.
type process struct {
	*netns.Cmd
	stdin io.WriteCloser
	lines chan string
}

// spawn starts a child on the NIC's end of the lab.
func spawn(t *testing.T, lab *netns.Lab, role string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: lab.NIC.NS.Command(context.Background(), exe), lines: make(chan string, 100)}
	p.Env = append(os.Environ(), childEnv+"="+role, childEnv+"_DEVICE="+lab.NIC.Device)
	p.Stderr = io.Discard // the NIC's log
	if p.stdin, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	t.Cleanup(func() { p.kill() })
	return p
}

// kill ends the child with SIGKILL. When it returns nothing of it is left.
func (p *process) kill() {
	p.Process.Kill()
	p.Wait()
}

// expect waits for a line that begins with prefix and returns it.
func (p *process) expect(t *testing.T, prefix string) string {
	t.Helper()
	deadline := time.After(testenv.Slowness() * 20 * time.Second)
	var seen []string
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				t.Fatalf("the child ended without saying %q, only %q", prefix, seen)
			}
			if strings.HasPrefix(line, prefix) {
				return line
			}
			seen = append(seen, line)
		case <-deadline:
			t.Fatalf("the child never said %q, only %q", prefix, seen)
		}
	}
}
