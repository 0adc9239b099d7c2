// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
)

// TestLabHelper is not a test: in a child process it runs command lines, the
// fields of a JSON [][]string, one after the other.
func TestLabHelper(t *testing.T) {
	script := os.Getenv("XSPIN_TEST_LAB")
	if script == "" {
		return
	}
	fail := func(err error) {
		os.Stderr.WriteString(err.Error() + "\n")
		os.Exit(99)
	}
	// The lab has fixed names: with a /run/netns of our own they meet nobody
	// else's, and go with this process.
	if os.Getenv("XSPIN_TEST_LAB_INSIDE") == "" {
		if err := os.MkdirAll("/run/netns", 0o755); err != nil {
			fail(err)
		}
		if err := unix.Mount("none", "/run/netns", "tmpfs", 0, ""); err != nil {
			fail(err)
		}
	}
	var lines [][]string
	if err := json.Unmarshal([]byte(script), &lines); err != nil {
		fail(err)
	}
	for _, args := range lines {
		switch args[0] {
		case "kill":
			killRelay(fail)
			continue
		case "run": // exec, and go on
			c := exec.Command("/proc/self/exe", "-test.run=^TestLabHelper$")
			b, _ := json.Marshal([][]string{args[1:]})
			c.Env = append(os.Environ(), "XSPIN_TEST_LAB="+string(b), "XSPIN_TEST_LAB_INSIDE=1")
			if out, err := c.CombinedOutput(); err != nil {
				fail(fmt.Errorf("%w: %s", err, out))
			}
			continue
		}
		cmd := newLabCmd()
		cmd.SetArgs(args)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); err != nil {
			fail(err)
		}
	}
	os.Exit(0)
}

// killRelay kills the process that listens where relays do, and waits for its end.
func killRelay(fail func(error)) {
	ns, err := netns.OpenNamespace("xspin-path")
	if err != nil {
		fail(err)
	}
	err = ns.Do(func() error {
		c, err := impair.DialRelay()
		if err != nil {
			return err
		}
		raw, err := c.(*net.UnixConn).SyscallConn()
		if err != nil {
			return err
		}
		var cred *unix.Ucred
		if cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); cerr != nil {
			return cerr
		}
		if err != nil {
			return err
		}
		if err := unix.Kill(int(cred.Pid), unix.SIGKILL); err != nil {
			return err
		}
		_, _ = c.Read(make([]byte, 1))
		return nil
	})
	if err != nil {
		fail(err)
	}
}

// runLab runs command lines of `xspin lab` in a process of their own.
func runLab(t *testing.T, lines ...string) (stdout, stderr string, status int) {
	t.Helper()
	netnstest.NeedRoot(t)
	var script [][]string
	for _, l := range lines {
		script = append(script, strings.Fields(l))
	}
	b, err := json.Marshal(script)
	if err != nil {
		t.Fatal(err)
	}
	var out, errs strings.Builder
	c := exec.Command("/proc/self/exe", "-test.run=^TestLabHelper$")
	c.Env = append(os.Environ(), "XSPIN_TEST_LAB="+string(b), "SUDO_COMMAND=")
	c.Stdout, c.Stderr = &out, &errs
	c.Args[0] = "bin/xspin"
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	var ee *exec.ExitError
	if err := c.Run(); err != nil && !errors.As(err, &ee) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

func TestLabUpDrawsTheLab(t *testing.T) {
	out, errs, status := runLab(t, "up --queues 2", "down", "down")
	const want = `  xspin-nic                   MTU 1500      xspin-host
  xs-nic 10.0.0.1/24      <---- veth ---->  xs-host 10.0.0.2/24
  02:00:00:00:00:01           queues 2      02:00:00:00:00:02
  wire: no, the host's end takes nothing that XDP sends
next: bin/xspin lab exec host -- ping -c 3 10.0.0.1
`
	if out != want || errs != "" || status != 0 {
		t.Errorf("got\n%s%s, status %d, want\n%s", out, errs, status, want)
	}
}

// Handlers in eBPF that answered do so no more: who sees neither that nor why looks for the
// mistake in the handlers.
func TestLabUpTellsThatItTakesTheWireOff(t *testing.T) {
	const yes, no, off = "  wire: yes, ", "  wire: no, ", "warning: the XDP program of the host's end was taken off: "
	out, errs, status := runLab(t, "up --wire", "show", "up --wire")
	if strings.Count(out, yes) != 3 || strings.Contains(out, no) || errs != "" || status != 0 {
		t.Errorf("with the wire:\n%s%s, status %d", out, errs, status)
	}
	out, errs, status = runLab(t, "up --wire --json", "up", "show", "up", "show --json")
	if strings.Count(out, no) != 3 || strings.Contains(out, yes) || strings.Count(errs, off) != 1 || strings.Count(errs, "\n") != 1 || status != 0 {
		t.Errorf("without it:\n%s%s, status %d", out, errs, status)
	}
	if strings.Count(out, `"wire": true`) != 1 || strings.Count(out, `"wire": false`) != 1 {
		t.Errorf("documents:\n%s", out)
	}
}

func TestLabUpDescribesTheLabAsJSON(t *testing.T) {
	out, errs, status := runLab(t, "up --mtu 9000 --queues 3 --json")
	var got any
	if err := json.Unmarshal([]byte(out), &got); err != nil || errs != "" || status != 0 {
		t.Fatalf("%v: %s%s, status %d", err, out, errs, status)
	}
	port := func(side, n string) map[string]any {
		return map[string]any{"namespace": "xspin-" + side, "device": "xs-" + side, "index": 2.0, "mac": "02:00:00:00:00:0" + n, "addr": "10.0.0." + n + "/24"}
	}
	want := map[string]any{"schema": 1.0, "mtu": 9000.0, "queues": 3.0, "wire": false, "nic": port("nic", "1"), "host": port("host", "2")}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestLabUpWithImpairmentsDrawsThem(t *testing.T) {
	out, errs, status := runLab(t, "up --loss 5% --dup 1% --reorder 3% --corrupt 0.1% --delay 2ms --rate 1gbit --seed 7 --direction to-host --queues 2", "down")
	const want = `  xspin-nic                   MTU 1500      xspin-host
  xs-nic 10.0.0.1/24      <- xspin-path ->  xs-host 10.0.0.2/24
  02:00:00:00:00:01           queues 2      02:00:00:00:00:02
  between: loss 5%, dup 1%, reorder 3%, corrupt 0.1%, delay 2ms, rate 1gbit, direction to-host, seed 7
  wire: no, the host's end takes nothing that XDP sends
next: bin/xspin lab exec host -- ping -c 3 10.0.0.1
`
	if out != want || errs != "" || status != 0 {
		t.Errorf("got\n%s%s, status %d, want\n%s", out, errs, status, want)
	}
}

func TestLabUpWithTrains(t *testing.T) {
	out, errs, status := runLab(t, "up --loss 1% --trains", "show", "up --loss 1% --trains --json", "up --loss 1%", "down")
	for _, want := range []string{"between: loss 1%, trains, seed 1", `"trains": true`, "between: loss 1%, seed 1"} {
		if !strings.Contains(out, want) || errs != "" || status != 0 {
			t.Errorf("got\n%s%s, status %d, want %q", out, errs, status, want)
		}
	}
}

// The relay is a process of this binary, which is there for the commands after
// `lab up` and goes with `lab down`.
func TestLabShowCountsWhatHappened(t *testing.T) {
	out, errs, status := runLab(t, "up --dup 100% --corrupt 0% --delay 1ms --rate 100mbit --direction from-host --json", "run exec host ping -q -c 1 10.0.0.1", "show --json", "down")
	docs := json.NewDecoder(strings.NewReader(out))
	var got struct {
		Path struct {
			Namespace string
			Dup       float64
			Delay     int64  `json:"delay_ns"`
			Rate      uint64 `json:"rate_bit_s"`
			Seed      uint64
			Direction string
			FromHost  impair.Counters `json:"from_host"`
			ToHost    impair.Counters `json:"to_host"`
		}
	}
	if err := docs.Decode(&got); err != nil || got.Path.FromHost.Frames != 0 || errs != "" || status != 0 {
		t.Fatalf("%v: %s%s, status %d", err, out, errs, status)
	}
	if err := docs.Decode(&got); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p := got.Path
	// An ARP request and an echo request, each twice; and what answers.
	if p.Namespace != "xspin-path" || p.Dup != 1 || p.Delay != 1e6 || p.Rate != 1e8 || p.Seed != 1 || p.Direction != "from-host" ||
		p.FromHost.Frames < 2 || p.FromHost.Duplicated != p.FromHost.Frames || p.FromHost.Delayed != 2*p.FromHost.Frames ||
		p.ToHost.Frames < 2 || p.ToHost.Duplicated != 0 || p.ToHost.Delayed != 0 {
		t.Errorf("got %+v", p)
	}
}

func TestLabShowDrawsATable(t *testing.T) {
	out, errs, status := runLab(t, "up --loss 0%", "show", "up", "show", "down")
	for _, want := range []string{"between: nothing impaired", "from host   to host", "frames           0         0  received", "link dropped"} {
		if !strings.Contains(out, want) || errs != "" || status != 0 {
			t.Errorf("got\n%s%s, status %d, want %q", out, errs, status, want)
		}
	}
	if strings.Contains(out, "delayed") || strings.Contains(out, "rate dropped") || strings.Count(out, "from host") != 1 {
		t.Errorf("got\n%s, want only what can happen, and one table", out)
	}
}

// Without `lab down`, the relay goes with whatever held the lab: here the mounts
// of a process that has ended.
func TestLabRelayHoldsNothing(t *testing.T) {
	mark := fmt.Sprintf("--seed %d", os.Getpid())
	if _, errs, status := runLab(t, "up --delay 1ms "+mark); errs != "" || status != 0 {
		t.Fatalf("%s, status %d", errs, status)
	}
	relays := func() (pids []string) {
		paths, err := filepath.Glob("/proc/[0-9]*/environ")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), fmt.Sprintf(`"--seed","%d"`, os.Getpid())) {
				pids = append(pids, p)
			}
		}
		return pids
	}
	for end := time.Now().Add(20 * time.Second); len(relays()) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still there: %v", relays())
		}
	}
}

func TestLabTellsThatItsRelayWasKilled(t *testing.T) {
	for _, tc := range []struct{ name, line, want string }{
		{"show", "show", "xspin lab up"},
		{"exec", "exec host true", "warning: "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, errs, _ := runLab(t, "up --delay 1ms", "kill", tc.line)
			if !strings.Contains(errs, tc.want) || !strings.Contains(errs, "no relay runs") {
				t.Errorf("got %q, want %q, and why", errs, tc.want)
			}
		})
	}
	if out, errs, status := runLab(t, "up --delay 1ms", "kill", "up --delay 1ms", "run exec host ping -q -c 1 10.0.0.1", "down"); errs != "" || status != 0 {
		t.Errorf("got %q, %q, status %d, want a lab that works again", out, errs, status)
	}
}

func TestLabExecPassesOnWhatTheCommandDoes(t *testing.T) {
	out, errs, status := runLab(t, "up --json", "exec nic -- cat /proc/self/net/arp /does/not/exist")
	if !strings.Contains(out, "HW address") || !strings.Contains(errs, "/does/not/exist") || status != 1 {
		t.Errorf("got %q, %q, status %d, want output, complaint and status 1 of cat", out, errs, status)
	}
	out, errs, status = runLab(t, "up --json", "exec host grep -c xs-host /proc/self/net/dev")
	if !strings.HasSuffix(out, "\n1\n") || status != 0 {
		t.Errorf("got %q, %q, status %d, want one device xs-host", out, errs, status)
	}
}

func TestLabErrorsSayTheWayOut(t *testing.T) {
	for _, tc := range []struct{ name, line, want string }{
		{"exec without a lab", "exec host true", "xspin lab up"},
		{"exec in a namespace that is not there", "exec blue true", "xspin lab up"},
		{"exec with one word", "exec true", "no command for true"},
		{"exec without a command", "exec nic --", "no command for nic"},
		{"MTU 0", "up --mtu 0", "--mtu 0"},
		{"MTU 67", "up --mtu 67", "want 68 to 65535"},
		{"queues 0", "up --queues 0", "--queues 0"},
		{"257 queues", "up --queues 257", "want 1 to 256"},
		{"an MTU that is no number", "up --mtu x", "invalid argument"},
		{"an argument to up", "up x", "unknown command"},
		{"a loss without its sign", "up --loss 0.05", `"0.05" for "--loss" flag: want 0% to 100%`},
		{"a loss of more than all", "up --loss 101%", `"101%" for "--loss" flag: want 0% to 100%`},
		{"a corruption of less than nothing", "up --corrupt=-1%", `"-1%" for "--corrupt" flag: want 0% to 100%`},
		{"a delay without unit", "up --delay 2", `"2" for "--delay" flag: want a time as in 2ms, 0s to 1s`},
		{"a delay that is too long", "up --delay 1001ms", "0s to 1s"},
		{"a rate that is none", "up --rate fast", `"fast" for "--rate" flag: want a rate as tc has it: 10mbit, 1gbit (8kbit to 100gbit`},
		{"a rate that is too low", "up --rate 1kbit", "8kbit to 100gbit"},
		{"a direction that is none", "up --direction up", `"up" for "--direction" flag: want both, from-host, to-host`},
		{"reordering without delay", "up --reorder 1%", "reorder 1% needs a delay"},
		{"trains that wait", "up --trains --delay 1ms", "trains go with loss and dup alone"},
		{"trains over a wire", "up --trains --wire", "--wire has senders cut the packets that --trains lets pass whole"},
		{"seed 0", "up --loss 1% --seed 0", "--seed 0: want 1 to"},
		{"show without a lab", "show", "xspin lab up"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if out, errs, status := runLab(t, tc.line); !strings.Contains(errs, tc.want) || status != 99 || out != "" {
				t.Errorf("got %q, %q, status %d, want an error with %q", out, errs, status, tc.want)
			}
		})
	}
}

func TestSplitExec(t *testing.T) {
	for _, tc := range []struct {
		args   string
		dashed bool
		name   string
		argv   string
	}{
		{"ping -c 1 x", true, "xspin-host", "ping -c 1 x"},
		{"nic", true, "xspin-host", "nic"},
		{"nic ping -c 1 x", false, "xspin-nic", "ping -c 1 x"},
		{"nic -- ping -- x", false, "xspin-nic", "ping -- x"},
		{"host ping", false, "xspin-host", "ping"},
		{"blue ping", false, "blue", "ping"},
		{"nic", false, "", ""},
		{"nic --", false, "", ""},
		{"", false, "", ""},
		{"", true, "", ""},
	} {
		name, argv, err := splitExec(strings.Fields(tc.args), tc.dashed)
		if name != tc.name || strings.Join(argv, " ") != tc.argv || (err != nil) != (tc.name == "") {
			t.Errorf("%q, dashed %v: got %q, %q, %v, want %q, %q", tc.args, tc.dashed, name, argv, err, tc.name, tc.argv)
		}
	}
}
