// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// A process is testdata/run: a daemon that does what its stdin says.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string
}

// openDir makes a directory for users of all kinds.
func openDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o777))
	must(t, os.Chmod(filepath.Dir(dir), 0o755))
	return dir
}

// build builds testdata/run without cgo, whichever way the test is built.
func build(t *testing.T) string {
	t.Helper()
	dir := openDir(t)
	bin := filepath.Join(dir, "run")
	cmd := exec.Command("go", "build", "-o", bin, "./testdata/run")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return bin
}

// run starts a daemon.
func run(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{cmd: cmd, lines: make(chan string, 100)}
	p.cmd.Stderr = logWriter{t}
	var err error
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
	})
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	return p
}

type logWriter struct{ t *testing.T }

func (w logWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

// ask says something to the process, if it is to hear something, and returns the rest
// of the line with which it answers.
func (p *process) ask(t *testing.T, say, prefix string) string {
	t.Helper()
	if say != "" {
		fmt.Fprintln(p.stdin, say)
	}
	for deadline := time.After(30 * time.Second); ; {
		select {
		case line, ok := <-p.lines:
			if !ok {
				t.Fatalf("the daemon ended without saying %q", prefix)
			}
			if rest, is := strings.CutPrefix(line, prefix); is {
				return strings.TrimSpace(rest)
			}
			t.Logf("daemon: %s", line)
		case <-deadline:
			t.Fatalf("the daemon does not say %q", prefix)
		}
	}
}

// writeFile writes a file of a test.
func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

// exchange sends a datagram from the host's end of a lab and returns the answer.
func exchange(t *testing.T, lab *netns.Lab, port int, text string) (string, error) {
	t.Helper()
	var got string
	err := lab.Host.NS.Do(func() error {
		c, err := net.Dial("udp", fmt.Sprintf("%v:%d", lab.NIC.Addr.Addr(), port))
		if err != nil {
			return err
		}
		defer c.Close()
		b := make([]byte, 2000)
		for range 20 { // the first may wait for a neighbour
			if _, err := c.Write([]byte(text)); err != nil {
				continue // refused, by the last answer
			}
			c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
			n, err := c.Read(b)
			if err == nil {
				got = string(b[:n])
				return nil
			}
		}
		return fmt.Errorf("no answer from port %d", port)
	})
	return got, err
}

func TestPrivileges(t *testing.T) {
	netnstest.NeedRoot(t)
	bin := build(t)
	t.Run("a daemon without does its work", func(t *testing.T) { withoutPrivileges(t, bin) })
	t.Run("packets and files come after root has gone", func(t *testing.T) { logsOfAUser(t, bin) })
	t.Run("the unit has those that are needed", func(t *testing.T) { unitCapabilities(t, bin) })
}

func withoutPrivileges(t *testing.T, bin string) {
	for _, user := range []string{"", "nobody"} {
		t.Run("user "+user, func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{})
			dir := openDir(t)
			secret := writeFile(t, filepath.Join(dir, "secret"), "of another user")
			if err := os.Chmod(secret, 0o600); err != nil {
				t.Fatal(err)
			}
			if user == "" { // root owns root's files, without any capability too
				if err := os.Chown(secret, 12345, 12345); err != nil {
					t.Fatal(err)
				}
			}
			text := `
user: USER
socket: DIR/s
interfaces:
- {name: DEVICE, netns: NETNS, hpus: 2, limit: 300ms}
windows:
- {name: common, size: 1MiB}
`
			if user == "" {
				text = strings.Replace(text, "user: USER\n", "", 1)
			}
			text = strings.NewReplacer("USER", user, "DIR", dir, "DEVICE", lab.NIC.Device, "NETNS", lab.NIC.Namespace).Replace(text)
			file := writeFile(t, filepath.Join(dir, "xspin.yaml"), text)
			p := run(t, exec.Command(bin, file))
			p.ask(t, "", "ready")

			// In all threads, the youngest too.
			caps := p.ask(t, "capabilities", "capabilities:")
			if strings.Contains(caps, "|") {
				t.Errorf("threads differ: %s", caps)
			}
			want := fmt.Sprintf("CapInh:%016x CapPrm:%016[2]x CapEff:%016[2]x CapBnd:%016[2]x CapAmb:%016[1]x NoNewPrivs:1", 0, keptMask())
			if !strings.Contains(caps, want) {
				t.Errorf("capabilities %s, want %s", caps, want)
			}
			if got := p.ask(t, "open "+secret, "opened:"); !strings.Contains(got, "permission denied") {
				t.Errorf("open another user's file: %s", got)
			}

			// All that it has to do is still possible.
			c, err := control.Dial(filepath.Join(dir, "s"))
			if err != nil {
				t.Fatal(err)
			}
			ctx := context.Background()
			if _, err := c.Install(ctx, &control.Context{Name: "first", Handler: "echo-udp", Params: map[string]any{"port": 7}}); err != nil {
				t.Fatal(err) // no program was attached until then
			}
			if _, err := c.Install(ctx, &control.Context{
				Name: "second", Handler: "echo-udp", Params: map[string]any{"port": 8}, HPUMemory: 4096, Memory: 4096,
				Windows: []control.Window{{Name: "own", Size: 1 << 20}, {Name: "common"}}, Queue: &control.Queue{},
			}); err != nil {
				t.Fatal(err)
			}
			for _, port := range []int{7, 8} {
				if got, err := exchange(t, lab, port, "hello"); err != nil || got != "hello" {
					t.Errorf("port %d answers %q, error %v", port, got, err)
				}
			}
			if _, err := c.Install(ctx, &control.Context{ // hands what it counts to Linux
				Name: "third", Handler: "count", Params: map[string]any{"to": "stack"}, Rulesets: "port: udp(9)",
			}); err != nil {
				t.Fatal(err)
			}
			linuxGets(t, lab, 9, func(got string) {
				if got != "for linux" {
					t.Errorf("Linux got %q", got)
				}
			}, "for linux")
			if _, err := c.Install(ctx, &control.Context{ // finds its own way to a neighbour
				Name: "fourth", Handler: "push", Params: map[string]any{"to": fmt.Sprintf("%v:5000", lab.Host.Addr.Addr())},
				Triggered: true, Windows: []control.Window{{Name: "out", Size: 1 << 20}},
			}); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("ip", "-n", lab.NIC.Namespace, "neigh", "flush", "all").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			pushed(t, lab, 5000, func() {
				if err := c.Trigger(ctx, "fourth", control.Trigger{Window: "out", Length: 100}); err != nil {
					t.Error(err)
				}
			})
			for _, name := range []string{"second", "fourth"} {
				if err := c.Remove(ctx, name); err != nil {
					t.Error(err)
				}
			}
			p.stdin.Close()
			if got := p.ask(t, "", "closed:"); got != "<nil>" {
				t.Errorf("closed with error %s", got)
			}
		})
	}
}

// Packets that come while a daemon starts, handlers that print, and whoever asks for
// metrics meet one without privileges, and its log files can be rotated.
func logsOfAUser(t *testing.T, bin string) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := openDir(t)
	must(t, os.Chmod(dir, 0o755)) // only root can make a directory for logs here
	log := filepath.Join(dir, "log", "say.log")
	text := fmt.Sprintf("user: nobody\nsocket: %s/s\nlog: {dir: %[1]s/log, rate: 20000}\ninterfaces: [{name: %s, netns: %s, limit: 1s}]\ncontexts:\n", dir, lab.NIC.Device, lab.NIC.Namespace) +
		"- {name: say, handler: say, rulesets: 'port: udp(9)'}\n"
	for i := range 20 { // armed one after the other, and later than the first
		text += echoes(fmt.Sprintf("echo%d", i), 10+i, "")
	}
	file := writeFile(t, filepath.Join(dir, "xspin.yaml"), text)
	var c net.Conn
	must(t, lab.Host.NS.Do(func() (err error) {
		c, err = net.Dial("udp", fmt.Sprintf("%v:9", lab.NIC.Addr.Addr()))
		return err
	}))
	defer c.Close()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for tick := time.Tick(200 * time.Microsecond); ; {
			_, _ = c.Write([]byte("once")) // refused, before it starts
			select {
			case <-tick:
			case <-stop:
				return
			}
		}
	}()
	p := run(t, exec.Command(bin, file))
	p.ask(t, "", "ready")
	logged := func() string {
		b, err := os.ReadFile(log)
		must(t, err)
		return string(b)
	}
	for deadline := time.Now().Add(30 * time.Second); strings.Count(logged(), "\n") < 20; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the log has\n%s", logged())
		}
	}
	close(stop)
	<-stopped
	want := fmt.Sprintf("Uid:%d CapInh:%016x CapPrm:%016[3]x CapEff:%016[3]x CapBnd:%016[3]x CapAmb:%016[2]x NoNewPrivs:1", nobody, 0, keptMask())
	for line := range strings.Lines(logged()) {
		if !strings.Contains(line, want) && !strings.Contains(line, "lost)") {
			t.Fatalf("a handler runs with %s, want %s", strings.TrimSpace(line), want)
		}
	}

	// 200 lines of 1 KB each.
	files := map[string]os.FileInfo{filepath.Dir(log): nil, log: nil, log + ".1": nil}
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		all := true // the daemon may be about to change names once more
		for name := range files {
			info, err := os.Stat(name)
			files[name] = info
			all = all && err == nil
		}
		if all {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the log file does not change its name when it is full")
		}
		_, _ = c.Write([]byte("often"))
	}
	for name, info := range files {
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != nobody || info.Mode().Perm()&0o007 != 0 {
			t.Errorf("%s is user %d's, with mode %v", name, uid, info.Mode())
		}
	}
	p.stdin.Close()
	if got := p.ask(t, "", "closed:"); got != "<nil>" {
		t.Errorf("closed with error %s", got)
	}
}

// The unit's daemon begins as a user of its own, with the capabilities that the
// unit names.
func unitCapabilities(t *testing.T, bin string) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	unit, err := os.ReadFile("../dist/systemd/xspin.service")
	must(t, err)
	byName := map[string]uintptr{
		"CAP_BPF": unix.CAP_BPF, "CAP_PERFMON": unix.CAP_PERFMON,
		"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW,
	}
	lists := map[string]string{}
	for line := range strings.Lines(string(unit)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			lists[key] = value
		}
	}
	if lists["AmbientCapabilities"] != lists["CapabilityBoundingSet"] {
		t.Errorf("ambient %q, bounding set %q", lists["AmbientCapabilities"], lists["CapabilityBoundingSet"])
	}
	if lists["LimitMEMLOCK"] != "infinity" {
		t.Errorf("LimitMEMLOCK %q", lists["LimitMEMLOCK"])
	}
	// Where tests may not raise the limit, the capability has to do.
	var more []uintptr
	var limit unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit))
	if unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}) == nil {
		defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &limit)
	} else {
		more = append(more, unix.CAP_IPC_LOCK)
	}
	dir := openDir(t)
	file := writeFile(t, filepath.Join(dir, "xspin.yaml"), fmt.Sprintf("socket: %s/s\ninterfaces: [{name: %s}]\ncontexts:\n%s", dir, lab.NIC.Device, echoes("a", 7, "windows: [{name: w, size: 1MiB}], queue: {}")))
	names := strings.Fields(lists["AmbientCapabilities"])
	for without := range len(names) + 1 {
		cmd := exec.Command(bin, file)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: more}
		for i, name := range names {
			c, ok := byName[name]
			if !ok {
				t.Fatalf("what is %s?", name)
			}
			if i != without {
				cmd.SysProcAttr.AmbientCaps = append(cmd.SysProcAttr.AmbientCaps, c)
			}
		}
		var p *process
		must(t, lab.NIC.NS.Do(func() error {
			p = run(t, cmd)
			return nil
		}))
		if without < len(names) { // each is needed
			if got := p.ask(t, "", "error:"); !strings.Contains(got, names[without]) {
				t.Errorf("without %s: %s", names[without], got)
			}
			continue
		}
		p.ask(t, "", "ready")
		if got, err := exchange(t, lab, 7, "hello"); err != nil || got != "hello" {
			t.Errorf("it answers %q, error %v", got, err)
		}
		writeFile(t, file, fmt.Sprintf("socket: %s/s\ninterfaces: [{name: %s}]\ncontexts:\n%s", dir, lab.NIC.Device, echoes("a", 8, "windows: [{name: w, size: 1MiB}], queue: {}")))
		if got := p.ask(t, "reload", "reloaded:"); got != `["context a changed: began anew"] <nil>` {
			t.Errorf("reload: %s", got)
		}
		if got, err := exchange(t, lab, 8, "hello"); err != nil || got != "hello" {
			t.Errorf("after a reload it answers %q, error %v", got, err)
		}
		p.stdin.Close()
		if got := p.ask(t, "", "closed:"); got != "<nil>" {
			t.Errorf("closed with error %s", got)
		}
	}
}

// keptMask is the set of needed capabilities.
func keptMask() (m uint64) {
	for _, c := range needed {
		m |= 1 << c
	}
	return m
}

// linuxGets has Linux on the NIC's end of a lab receive a datagram.
func linuxGets(t *testing.T, lab *netns.Lab, port int, check func(string), text string) {
	t.Helper()
	var l net.PacketConn
	if err := lab.NIC.NS.Do(func() (err error) {
		l, err = net.ListenPacket("udp", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := lab.Host.NS.Do(func() error {
		c, err := net.Dial("udp", fmt.Sprintf("%v:%d", lab.NIC.Addr.Addr(), port))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte(text))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2000)
	l.SetReadDeadline(time.Now().Add(10 * time.Second))
	n, _, err := l.ReadFrom(b)
	if err != nil {
		t.Fatal(err)
	}
	check(string(b[:n]))
}

// pushed calls f until a datagram comes to a port of the host.
func pushed(t *testing.T, lab *netns.Lab, port int, f func()) {
	t.Helper()
	var l net.PacketConn
	if err := lab.Host.NS.Do(func() (err error) {
		l, err = net.ListenPacket("udp", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 50 {
		f()
		l.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		if _, _, err := l.ReadFrom(make([]byte, 2000)); err == nil {
			return
		}
	}
	t.Error("nothing came")
}
