// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/nicsock"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/spin"
)

func runStats(args ...string) (string, error) {
	var out bytes.Buffer
	root := newRootCmd()
	root.SetArgs(append([]string{"stats"}, args...))
	root.SetOut(&out)
	err := root.Execute()
	return out.String(), err
}

func TestStatsWithoutNICSaysHowToStartOne(t *testing.T) {
	t.Setenv("XSPIN_SOCKET", "")
	if _, err := runStats("no-such-nic"); err == nil || !strings.Contains(err.Error(), "no running NIC") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(control.Socket); err == nil {
		return // a daemon runs here
	}
	_, err := runStats("no-such-nic")
	for _, want := range []string{control.Socket, "xspin run", "XSPIN_SOCKET"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v says nothing of %s", err, want)
		}
	}
}

func TestStatsOfAContextNamesTheCommand(t *testing.T) {
	s := newStandIn(t)
	t.Setenv("XSPIN_SOCKET", s.socket)
	for _, socket := range [][]string{nil, {"--socket", s.socket}} {
		_, err := runStats(append([]string{"inbox"}, socket...)...)
		if err == nil || !strings.HasSuffix(err.Error(), `no running NIC on "inbox": the daemon at `+s.socket+` has eth1; inbox is a context: `+"`xspin ctx show inbox`") {
			t.Errorf("%v: %v", socket, err)
		}
	}
}

// statsNIC opens a NIC that answers UDP port 7, on an interface of that name.
func statsNIC(t *testing.T, device string) (*nic.NIC, *netns.Lab) {
	t.Helper()
	lab := netnstest.Temp(t, netns.LabConfig{NIC: netns.End{Device: device}, Queues: 1})
	var n *nic.NIC
	if err := lab.NIC.NS.Do(func() (err error) {
		n, err = nic.Open(nic.Config{Interface: device, HPUs: 2})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	c, err := n.Install(nic.ContextSpec{
		Name:     "echo",
		Rulesets: []matcher.Ruleset{matcher.UDPPort(7)},
		Handlers: hpu.Handlers{Payload: func(h *hpu.HER) spin.Code {
			if !h.Headers().ReplyUDP() || h.Send() != nil {
				return spin.Fail
			}
			return spin.Success
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Activate(c); err != nil {
		t.Fatal(err)
	}
	return n, lab
}

func TestStatsOfARunningNIC(t *testing.T) {
	device := fmt.Sprintf("xst%d", os.Getpid())
	n, lab := statsNIC(t, device)
	if err := n.ServeStats(); err != nil {
		t.Fatal(err)
	}
	if err := lab.Host.NS.Do(func() error { return udpEchoes(lab.NIC.Addr.Addr().String(), 3) }); err != nil {
		t.Fatal(err)
	}

	var doc struct {
		Schema int
		nic.Stats
	}
	var raw map[string]any
	// A reply may be here before its handler is counted.
	for range 2000 {
		out, err := runStats(device, "--json")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(out), &doc); err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		if err := json.Unmarshal([]byte(out), &raw); err != nil {
			t.Fatal(err)
		}
		if len(doc.Contexts) == 1 && doc.Contexts[0].Handled == 3 && doc.Contexts[0].Sent == 3 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if doc.Schema != 1 || doc.Interface != device || doc.Queues != 1 || len(doc.HPUs) != 2 || doc.Program.Redirected != 3 {
		t.Errorf("JSON document %+v", doc)
	}
	if len(doc.Contexts) != 1 || doc.Contexts[0].Name != "echo" || doc.Contexts[0].Handled != 3 || doc.Contexts[0].Sent != 3 || doc.Contexts[0].Rulesets[0].Matched != 3 {
		t.Errorf("contexts %+v", doc.Contexts)
	}
	for _, key := range []string{"schema", "interface", "mode", "zero_copy", "multi_buffer", "queues", "generation", "program", "contexts", "hpus", "sockets", "stack_failures", "events_lost", "stuck"} {
		if _, ok := raw[key]; !ok {
			t.Errorf("no key %q in the JSON document", key)
		}
	}

	out, err := runStats(device)
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]string)
	for line := range strings.Lines(out) {
		rows[strings.Join(strings.Fields(line), " ")] = line
	}
	multi := map[bool]string{true: "yes", false: "no"}[doc.MultiBuffer]
	for _, want := range []string{
		fmt.Sprintf("%s: %s XDP, %s, multi-buffer %s, 1 receive queue, table generation %d", device, doc.Mode, map[bool]string{true: "zero-copy", false: "copy"}[doc.ZeroCopy], multi, doc.Generation),
		"redirected 3 to an HPU",
		"ruleset 0 3 frames matched by " + doc.Contexts[0].Rulesets[0].Name,
		"active yes it gets packets, or can be triggered",
		"share 1 weight of its HPU time",
		fmt.Sprintf("granted %d the same, while there is HPU time for all", doc.Contexts[0].Granted),
		"handled 3 handlers that returned",
		"sent 3 frames of handlers given to a tx ring",
		"handler p50 " + within(&doc.Contexts[0].HandlerTime, 50) + " half of the handlers take at most this",
		"handler p99 " + within(&doc.Contexts[0].HandlerTime, 99) + " of 100 handlers 99 take at most this",
		"rx dropped 0 frames lost for lack of a buffer",
		"stuck 0 handlers past their limit that have not returned",
	} {
		if _, ok := rows[want]; !ok {
			t.Errorf("no row %q", want)
		}
	}
	if !strings.Contains(out, fmt.Sprintf("\nContext %d, echo\n", doc.Contexts[0].ID)) {
		t.Error("no context echo")
	}
	if t.Failed() {
		t.Logf("prints\n%s", out)
	}
}

// udpEchoes sends datagrams to port 7, one after the other, and waits for each
// to come back.
func udpEchoes(addr string, n int) error {
	c, err := net.Dial("udp", net.JoinHostPort(addr, "7"))
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	for range n {
		if _, err := c.Write([]byte("hello")); err != nil {
			return err
		}
		if _, err := c.Read(make([]byte, 16)); err != nil {
			return err
		}
	}
	return nil
}

func TestStatsOfASecondNICOnAnInterfaceOfTheSameName(t *testing.T) {
	device := fmt.Sprintf("xst%d", os.Getpid())
	n, _ := statsNIC(t, device)
	first, err := nicsock.Serve(device, func() (any, error) { return nic.Stats{Interface: "first"}, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if err := n.ServeStats(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{device: "first", fmt.Sprintf("%s-%d", device, os.Getpid()): device} {
		if out, err := runStats(name); err != nil || !strings.HasPrefix(out, want+": ") {
			t.Errorf("stats %s: error %v, want those of %s\n%s", name, err, want, out)
		}
	}
	if _, err := runStats(); err == nil || !strings.Contains(err.Error(), "several NICs are running, name one: ") {
		t.Errorf("stats without a name: error %v", err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(nicsock.Dir, fmt.Sprintf("%s-%d.sock", device, os.Getpid()))); !os.IsNotExist(err) {
		t.Errorf("the socket of a closed NIC: %v", err)
	}
}

func TestWithin(t *testing.T) {
	for _, tt := range []struct {
		name     string
		h        spin.Histogram
		p50, p99 string
	}{
		{"no handler ran", spin.Histogram{}, "-", "-"},
		{"all alike", spin.Histogram{7: 3}, "< 128ns", "< 128ns"},
		{"1 of 100 is slow", spin.Histogram{7: 99, 20: 1}, "< 128ns", "< 128ns"},
		{"2 of 100 are slow", spin.Histogram{7: 98, 20: 2}, "< 128ns", "< 1.048576ms"},
		{"half is slow", spin.Histogram{7: 2, 20: 2}, "< 128ns", "< 1.048576ms"},
		{"more than half is very slow", spin.Histogram{7: 2, 31: 3}, ">= 1.073741824s", ">= 1.073741824s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if p50, p99 := within(&tt.h, 50), within(&tt.h, 99); p50 != tt.p50 || p99 != tt.p99 {
				t.Errorf("p50 %s, p99 %s, want %s, %s", p50, p99, tt.p50, tt.p99)
			}
		})
	}
}
