// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/bpf"
	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// The test binary is xspin for daemons.
func init() {
	if os.Getenv("XSPIN_TEST_DAEMON") != "" {
		Main()
		os.Exit(0)
	}
}

func runCheck(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	root := newRootCmd()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(io.Discard)
	root.SetArgs(append([]string{"run"}, args...))
	err = root.Execute()
	return out.String(), err
}

func TestRunChecks(t *testing.T) {
	good := writeFile(t, "good.yaml", []byte(exampleConfig))
	if out, err := runCheck(t, good, "--check"); err != nil || out != good+": 1 interface, 3 contexts\n" {
		t.Errorf("the example of the help: %q, %v", out, err)
	}
	bad := writeFile(t, "bad.yaml", []byte("interfaces:\n  - name: eth1\ncontexts:\n  - name: a\n    handler: depsit\n  - name: b\n    handler: echo-udp\n    params: {prt: 7}\n"))
	out, err := runCheck(t, bad, "--check")
	if err == nil || out != "" {
		t.Fatalf("%q, %v", out, err)
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 3 || lines[0] != "run: 2 errors:" || !strings.HasPrefix(lines[1], bad+":5:") || !strings.Contains(lines[2], `:8:19: contexts[1].params.prt: handler echo-udp: no such parameter: want port (`) {
		t.Errorf("errors are not told one on a line, with their places:\n%v", err)
	}
	shadowed := writeFile(t, "shadowed.yaml", []byte("interfaces:\n- name: eth1\ncontexts:\n- {name: a, handler: echo-udp}\n- {name: b, handler: echo-udp}\n"))
	root := newRootCmd()
	var warnings bytes.Buffer
	root.SetOut(io.Discard)
	root.SetErr(&warnings)
	root.SetArgs([]string{"run", "--check", shadowed})
	if err := root.Execute(); err != nil || !strings.HasPrefix(warnings.String(), "warning: contexts[1]: ") || !strings.Contains(warnings.String(), "is shadowed by") {
		t.Errorf("%q, %v", warnings.String(), err)
	}
	inKernel := writeFile(t, "kernel.yaml", []byte("kernel: administrators\ninterfaces: [{name: eth1}]\ncontexts:\n- {name: a, tier: kernel, object: "+writeFile(t, "a.o", bpf.Handlers["noop"])+", rulesets: 'a: udp(7)'}\n"))
	if out, err := runCheck(t, inKernel, "--check"); err != nil || out != inKernel+": 1 interface, 1 context; no object was loaded: `xspin object check` asks the kernel's verifier\n" {
		t.Errorf("%q, %v", out, err)
	}
	for args, want := range map[string]string{
		"/nonexistent.yaml": "no such file",
		good + " more":      `run: unexpected argument "more": xspin run [CONFIG]`,
		"--config " + good:  "the daemon's configuration, which is an argument: `xspin run " + good,
	} {
		if _, err := runCheck(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	if _, err := os.Stat(daemonConfig); os.IsNotExist(err) {
		if _, err := runCheck(t, "--check"); err == nil || !strings.Contains(err.Error(), "xspin run --help") {
			t.Errorf("without a file: %v", err)
		}
	}
}

func TestRunListensWhereCommandsLook(t *testing.T) {
	plain := writeFile(t, "plain.yaml", []byte(exampleConfig))
	named := writeFile(t, "named.yaml", []byte("socket: /run/file.sock\n"+exampleConfig))
	for _, c := range []struct{ file, flag, env, want string }{
		{plain, "", "", ""},
		{plain, "", "/run/env.sock", "/run/env.sock"},
		{plain, "/run/flag.sock", "/run/env.sock", "/run/flag.sock"},
		{named, "", "/run/env.sock", "/run/file.sock"},
		{named, "/run/flag.sock", "/run/env.sock", "/run/flag.sock"},
	} {
		t.Setenv("XSPIN_RUN_SOCKET", "")
		t.Setenv("XSPIN_SOCKET", c.env)
		cfg, err := loadRun(c.file, c.flag)
		if err != nil || cfg.Socket != c.want {
			t.Errorf("%+v: %v, %v", c, cfg, err)
		}
		// So a reload finds no change.
		if cfg, err = daemon.Load(c.file); err != nil || cfg.Socket != c.want {
			t.Errorf("%+v: on a reload %v, %v", c, cfg, err)
		}
	}
}

// A daemonProcess is an `xspin run`, and what it says.
type daemonProcess struct {
	t      *testing.T
	lab    *netns.Lab
	cmd    *exec.Cmd
	lines  chan string
	config string
	socket string
	page   string // of --web
}

// startDaemon runs a daemon with contexts on the NIC end of a lab, with more arguments.
func startDaemon(t *testing.T, contexts string, args ...string) *daemonProcess {
	t.Helper()
	lab := netnstest.Temp(t, netns.LabConfig{})
	d := &daemonProcess{t: t, lab: lab, lines: make(chan string, 1000), socket: filepath.Join(t.TempDir(), "d.sock")}
	d.config = filepath.Join(t.TempDir(), "xspin.yaml")
	// Applications of other users come to the socket.
	if err := os.Chmod(filepath.Dir(filepath.Dir(d.socket)), 0o755); err != nil {
		t.Fatal(err)
	}
	d.write(fmt.Sprintf("interfaces:\n  - {name: %s, netns: %s, hpus: 2}\n", lab.NIC.Device, lab.NIC.NS.Name()) + contexts)
	d.cmd = exec.Command("/proc/self/exe", append([]string{"run", d.config, "--socket", d.socket}, args...)...)
	d.cmd.Env = append(os.Environ(), "XSPIN_TEST_DAEMON=1")
	stderr, err := d.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(d.lines)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			d.lines <- s.Text()
		}
	}()
	t.Cleanup(func() { _ = d.cmd.Process.Kill() })
	if slices.Contains(args, "--web") {
		_, d.page, _ = strings.Cut(d.await("the live page is at"), " url=")
	}
	d.await("msg=running")
	return d
}

func (d *daemonProcess) write(config string) {
	d.t.Helper()
	if err := os.WriteFile(d.config, []byte(config), 0o600); err != nil {
		d.t.Fatal(err)
	}
}

// await returns the next line that has a text.
func (d *daemonProcess) await(text string) string {
	d.t.Helper()
	late := time.After(30 * time.Second)
	for {
		select {
		case line, ok := <-d.lines:
			if !ok {
				d.t.Fatalf("the daemon has ended and not said %q", text)
			}
			d.t.Log(line)
			if strings.Contains(line, text) {
				return line
			}
		case <-late:
			d.t.Fatalf("the daemon does not say %q", text)
		}
	}
}

func TestRunReloadsAndEnds(t *testing.T) {
	const ping = "contexts:\n  - {name: ping, handler: echo-icmp}\n"
	d := startDaemon(t, ping)
	c, err := control.Dial(d.socket)
	if err != nil {
		t.Fatal(err)
	}
	names := func() string {
		t.Helper()
		all, err := c.Contexts(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, x := range all {
			names = append(names, x.Name+" "+x.State)
		}
		return strings.Join(names, ", ")
	}
	if got := names(); got != "ping active" {
		t.Fatalf("contexts %q", got)
	}
	before, err := os.ReadFile(d.config)
	if err != nil {
		t.Fatal(err)
	}
	d.write(string(before) + "  - {name: echo, handler: echo-udp, params: {port: 5000}}\n")
	if err := d.cmd.Process.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if line := d.await("msg=reloaded"); !strings.Contains(line, "echo") {
		t.Errorf("what has changed? %s", line)
	}
	if got := names(); got != "ping active, echo active" && got != "echo active, ping active" {
		t.Errorf("after a reload: %q", got)
	}
	d.write(string(before) + "  - {name: echo, handler: nonsense}\n  - {name: more, handler: nonsense}\n")
	if err := d.cmd.Process.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if line := d.await("nothing was changed"); strings.Count(line, "nonsense") != 2 {
		t.Errorf("why not? %s", line)
	}
	if got := names(); !strings.Contains(got, "echo active") {
		t.Errorf("after a reload that failed: %q", got)
	}

	// What was installed by hand, for all to see.
	s := &standIn{socket: d.socket}
	if out, err := s.run("{name: drop, handler: count, params: {to: drop}, rulesets: 'd: udp(9)'}", "ctx", "install", "-"); err != nil || !strings.Contains(out, "drop: active") {
		t.Fatalf("%q, %v", out, err)
	}
	var said, warned bytes.Buffer
	if err := xspin(t.Context(), strings.NewReader("{name: late, handler: count, rulesets: 'd: udp(9)'}"), &said, &warned, "ctx", "install", "-", "--socket", d.socket); err != nil || !strings.HasPrefix(warned.String(), `warning: context "late": ruleset d is shadowed by the same one of context "drop"`) {
		t.Errorf("%s%s%v", &said, &warned, err)
	}
	if out, err := s.run("", "ctx", "rm", "late"); err != nil || out != "context late removed\n" {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := s.run("", "rules", "ls"); err != nil || !strings.Contains(out, "d: ") || strings.Count(out, "\n") != 4 {
		t.Errorf("%v\n%s", err, out)
	}
	for _, line := range []string{"ctx deactivate drop", "ctx activate drop", "ctx show drop", "ctx rm drop"} {
		if out, err := s.run("", strings.Fields(line)...); err != nil {
			t.Errorf("%s: %v\n%s", line, err, out)
		}
	}
	if got := names(); strings.Contains(got, "drop") {
		t.Errorf("removed, and there: %q", got)
	}

	if err := d.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	d.await("msg=ended")
	if err := d.cmd.Wait(); err != nil {
		t.Errorf("ended by a signal: %v", err)
	}
	if _, err := os.Stat(d.socket); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// TestRunSendsByItself has a timer and a trigger send datagrams: no packet calls them.
func TestRunSendsByItself(t *testing.T) {
	d := startDaemon(t, `contexts:
  - {name: tick, handler: tick, params: {to: "10.0.0.2:9400"}, timer: 20ms}
  - {name: push, handler: push, params: {to: "10.0.0.2:9500"}, triggered: true, windows: [{name: out, size: 1MiB}]}
`)
	listen := func(port int) (c *net.UDPConn) {
		t.Helper()
		err := d.lab.Host.NS.Do(func() (err error) {
			c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: port})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	ticks, pushed := listen(9400), listen(9500)
	b := make([]byte, 2000)
	// The first one waits for the neighbour's address, and comes later.
	n, from, err := ticks.ReadFromUDP(b)
	if err != nil || n != 24 || !from.IP.Equal(net.IP(d.lab.NIC.Addr.Addr().AsSlice())) {
		t.Fatalf("telemetry of %d bytes from %v, %v", n, from, err)
	}
	s := &standIn{socket: d.socket}
	if out, err := s.run("", "ctx", "trigger", "push", "--window", "out", "--length", "3000", "--slice", "1400"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []int{1400, 1400, 200} {
		if n, _, err := pushed.ReadFromUDP(b); err != nil || n != want {
			t.Errorf("pushed %d bytes, want %d: %v", n, want, err)
		}
	}
	for args, want := range map[string]string{
		"ctx trigger push --window in --length 1":                "in",
		"ctx trigger push --window out --offset 1MiB --length 1": "out",
		"ctx trigger tick --words 1":                             "tick",
		"ctx trigger nobody":                                     "nobody",
	} {
		if _, err := s.run("", strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

func TestRunWithoutItsInterfaceFails(t *testing.T) {
	netnstest.NeedRoot(t)
	file := writeFile(t, "x.yaml", []byte("interfaces: [{name: xs-nonesuch}]\ncontexts: [{name: ping, handler: echo-icmp}]\n"))
	cmd := exec.Command("/proc/self/exe", "run", file, "--socket", filepath.Join(t.TempDir(), "d.sock"))
	cmd.Env = append(os.Environ(), "XSPIN_TEST_DAEMON=1")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "xs-nonesuch") {
		t.Errorf("%v\n%s", err, out)
	}
}
