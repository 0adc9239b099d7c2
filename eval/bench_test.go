// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/cli"
	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/peers"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
)

// The benches start their own executable for what must be another process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "send" || strings.HasPrefix(os.Args[1], "_")) {
		cli.Main(Commands()...)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// benchCmd is the command as the root of the command line has it.
func benchCmd() *cobra.Command {
	cmd := newBenchCmd()
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	return cmd
}

func TestBenchRefusesFlagsBeforeAnythingIsSetUp(t *testing.T) {
	for _, tc := range []struct{ name, args, want string }{
		{"no runs", "rx --runs 0", "--runs 0: want 1 to 1000"},
		{"too many runs", "match --runs 1001", "--runs 1001: want 1 to 1000"},
		{"too short", "rx --duration 9ms", "--duration 9ms: want 10ms to 1m0s"},
		{"too long", "rtt --duration 61s", "--duration 1m1s: want 50ms to 1m0s"},
		{"parts of a second for iperf3", "bystander --duration 1500ms", "--duration 1.5s: want 1s to 1m0s in steps of 1s"},
		{"arguments", "rx now", "unknown command"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := benchCmd()
			root.SetArgs(strings.Fields(tc.args))
			var out bytes.Buffer
			root.SetOut(&out)
			root.SetErr(&out)
			if err := root.Execute(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
			if out.Len() > 0 {
				t.Errorf("printed %q", out.String())
			}
		})
	}
}

// measures tells whether a test may run a bench: not with the race detector, which would
// be what is measured, for minutes. make test runs these without it, too.
func measures(t *testing.T) bool {
	netnstest.NeedRoot(t)
	if testenv.Race {
		t.Log("only without the race detector")
	}
	return !testenv.Race
}

// Every bench has its rows, whatever their figures, and leaves nothing.
func TestBenchesMeasureEveryRow(t *testing.T) {
	if !measures(t) {
		return
	}
	for _, tc := range []struct {
		name     string
		runs     int
		duration time.Duration
		path     string // PATH
		rows     string
		warning  string
	}{
		{"rx", 2, 20 * time.Millisecond, "", "rx/noop_over_bare_64B rx/busy_ns_over_bare rx/bare_over_c rx/c_64B rx/noop_64B rx/bare_64B rx/ns_over_bare rx/allocs_per_packet idle/cpu_percent idle/rss_mib", ""},
		{"rx", 1, 10 * time.Millisecond, "/nonexistent", "rx/noop_over_bare_64B rx/busy_ns_over_bare rx/noop_64B rx/bare_64B rx/ns_over_bare rx/allocs_per_packet idle/cpu_percent idle/rss_mib", "no row rx/bare_over_c: no C compiler"},
		{"match", 1, 10 * time.Millisecond, "", "match/drop4x4_over_drop match/drop4x4_64B match/drop_64B match/miss256_ns match/miss256_first_ns match/hit256_ns match/hit4x4_ns match/miss256_hard_ns", ""},
		{"rtt", 1, 20 * time.Millisecond, "", "rtt/udp_cross_core rtt/udp_same_core rtt/udp_unpinned rtt/udp_5ms_cross_core rtt/udp_5ms_same_core rtt/udp_spin_over_spin rtt/icmp_sleeping_16 rtt/icmp_awake_16 rtt/icmp_awake_516 rtt/icmp_awake_1016 rtt/icmp_awake_1416", ""},
		{"kernel", 1, 20 * time.Millisecond, "", "kernel/noop_over_drop_64B kernel/udp_echo_over_bare_tx kernel/udp_echo_cross_core kernel/udp_echo_same_core kernel/icmp_16 kernel/icmp_516 kernel/icmp_1016 kernel/icmp_1416 kernel/slmp_noop3_over_drop kernel/slmp_deposit_over_drop_1514B kernel/file_over_user_tier kernel/file kernel/file_loss1_over_loss0 kernel/messages_ended_loss1_reorder3 tc/file_over_tcp tc/two_files_over_tcp tc/cpu_per_gb_over_tcp tc/file_stored_over_tcp tc/file tc/message_4MiB_one_at_a_time tc/bystander_tcp tc/bystander_tcp_out tc/udp_echo_over_xdp_16 tc/udp_echo_over_xdp_1416 tc/icmp_over_linux_16 tc/icmp_over_linux_516 tc/icmp_over_linux_1016 tc/icmp_over_linux_1416 tc/small_messages_over_udp_echo tc/file_loss1_over_loss0", ""},
		{"bystander", 1, time.Second, "", "bystander/tcp_over_pass bystander/tcp_over_none bystander/tcp_out_over_pass bystander/tcp_out_over_none", ""},
		{"bystander", 1, time.Second, "/nonexistent", "", "no rows bystander/*: iperf3 is needed"},
	} {
		t.Run(tc.name+tc.path, func(t *testing.T) {
			if tc.path != "" {
				t.Setenv("PATH", tc.path)
			} else if testing.Short() {
				t.Skip("takes seconds")
			}
			var warnings []string
			cfg := benchConfig{tc.runs, tc.duration, 100 * time.Millisecond, func(s string) { warnings = append(warnings, s) }}
			i := slices.IndexFunc(benches, func(b benchCommand) bool { return b.name == tc.name })
			doc := bench.NewDocument(bench.Environment(tc.name, cfg.runs, cfg.duration))
			measure := benches[i].measure
			if benches[i].flags != nil {
				fl := pflag.NewFlagSet("", pflag.ContinueOnError)
				judge := benches[i].flags(fl)
				err := fl.Set("size", "4MiB")
				if err == nil {
					measure, err = judge()
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := runBench(t.Context(), cfg, doc, measure); err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, r := range doc.Results {
				names = append(names, r.Name)
				if r.Conditions == "" || r.A == nil || len(r.A.Runs) == 0 || r.B != nil && len(r.B.Runs) != len(r.A.Runs) || r.Unit == "ratio" && r.B == nil {
					t.Errorf("%+v", r)
				}
			}
			if got := strings.Join(names, " "); got != tc.rows {
				t.Errorf("rows %s\nwant %s", got, tc.rows)
			}
			if got := strings.Join(warnings, "\n"); !strings.HasPrefix(got, tc.warning) || (got == "") != (tc.warning == "") {
				t.Errorf("warned %q, want %q", got, tc.warning)
			}
			var out bytes.Buffer
			if err := doc.WriteJSON(&out); err != nil || !json.Valid(out.Bytes()) {
				t.Errorf("JSON %s, error %v", out.String(), err)
			}
			noBenchLab(t, os.Getpid())
		})
	}
}

func noBenchLab(t *testing.T, pid int) {
	t.Helper()
	for _, side := range []string{"nic", "host", "path"} {
		if _, err := os.Stat("/run/netns/" + fmt.Sprintf(benchNamespace, pid) + side); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the lab's %s end is still there: %v", side, err)
		}
	}
}

func TestInterruptedBenchCleansUp(t *testing.T) {
	netnstest.NeedRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	doc := bench.NewDocument(bench.Env{})
	err := runBench(ctx, benchConfig{1000, 10 * time.Millisecond, time.Hour, func(string) {}}, doc,
		func(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
			time.AfterFunc(100*time.Millisecond, cancel)
			return benchMatch(ctx, lab, cfg, doc)
		})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	noBenchLab(t, os.Getpid())
}

func TestRowsMeasuredBeforeAnErrorArePrinted(t *testing.T) {
	netnstest.NeedRoot(t)
	all := benches
	defer func() { benches = all }()
	broken := errors.New("broken")
	for rows := range 2 {
		benches = []benchCommand{{
			name: "half", duration: time.Second, step: time.Millisecond,
			measure: func(_ context.Context, _ *benchLab, _ benchConfig, doc *bench.Document) error {
				for range rows {
					row, err := bench.Absolute("half/row", bench.Higher, bench.NewSide("", "x", []float64{1}))
					if err := doc.Add("", row, err); err != nil {
						return err
					}
				}
				return broken
			},
		}}
		root := benchCmd()
		root.SetArgs([]string{"half", "--json"})
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetErr(&out)
		if err := root.Execute(); !errors.Is(err, broken) {
			t.Errorf("error %v", err)
		}
		var doc bench.Document
		if err := json.Unmarshal(out.Bytes(), &doc); rows == 0 && out.Len() > 0 || rows > 0 && (err != nil || len(doc.Results) != rows) {
			t.Errorf("%d rows: printed %q, error %v", rows, out.String(), err)
		}
	}
	noBenchLab(t, os.Getpid())
}

func TestLabsOfKilledBenchesAreRemovedAndOthersNot(t *testing.T) {
	netnstest.NeedRoot(t)
	gone := exec.Command("/bin/true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	alive := os.Getppid()
	for _, pid := range []int{gone.Process.Pid, alive} {
		l, err := netns.Up(benchLabConfig(pid, nil))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Down(); err != nil {
				t.Error(err)
			}
		})
	}
	sweepBenchLabs(func(s string) { t.Error(s) })
	noBenchLab(t, gone.Process.Pid)
	if _, err := netns.OpenNamespace(fmt.Sprintf(benchNamespace, alive) + "nic"); err != nil {
		t.Errorf("the lab of a process that lives: %v", err)
	}
}

// ends is a lab on paper.
func ends() *benchLab {
	return &benchLab{Lab: &netns.Lab{
		NIC:  netns.Port{End: netns.End{MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Addr: netip.MustParsePrefix("10.0.0.1/24")}},
		Host: netns.Port{End: netns.End{MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, Addr: netip.MustParsePrefix("10.0.0.2/24")}},
	}}
}

func TestGeneratedFramesAreProperUDP(t *testing.T) {
	f := ends().udpFrame(64)
	h := packet.Parse(f, len(f))
	if h.UDP == nil || h.UDP.DstPort() != benchPort || !h.IPv4.ChecksumValid() || h.IPv4.TotalLen() != 50 || h.UDP.Length() != 30 {
		t.Errorf("% x", f)
	}
	v := table4x4().Match(f)
	if v.Action != matcher.Deliver || v.Ruleset != 3 {
		t.Errorf("4 rulesets: %+v", v)
	}
	for i, e := range table4x4().Entries {
		if len(e.Rules) != 4 {
			t.Errorf("ruleset %d has %d rules", i, len(e.Rules))
		}
	}
}

func TestFullTableIsFullAndItsFramesMissLate(t *testing.T) {
	l := ends()
	full := l.table256()
	x, err := matcher.Compile(full)
	if err != nil {
		t.Fatal(err)
	}
	if len(full.Entries) != matcher.MaxRulesets || len(x.Fields) != matcher.MaxRules || x.Fields[len(x.Fields)-1].Index != kindWord {
		t.Errorf("%d rulesets, fields %+v", len(full.Entries), x.Fields)
	}
	for i, e := range full.Entries {
		if len(e.Rules) != matcher.MaxRules || e.EOM == nil {
			t.Errorf("ruleset %d: %d rules, EOM %v", i, len(e.Rules), e.EOM)
		}
		if v := full.Match(l.full256Frame(i)); v.Action != matcher.Deliver || v.Ruleset != i {
			t.Errorf("frame %d: %+v", i, v)
		}
	}
	late := l.lateFrame()
	if v := full.Match(late); v.Action != matcher.Pass {
		t.Errorf("the frame that misses: %+v", v)
	}
	for _, r := range full.Entries[0].Rules {
		if got := r.Match(late); got != (r.Index != kindWord) {
			t.Errorf("rule %+v: %v", r, got)
		}
	}
}

func TestHardTableSharesNothingAndNoRulesetDropsOutEarly(t *testing.T) {
	hard, frame := hard256()
	x, err := matcher.Compile(hard)
	if err != nil {
		t.Fatal(err)
	}
	if len(x.Fields) != matcher.MaxTableRules {
		t.Errorf("%d fields, want %d", len(x.Fields), matcher.MaxTableRules)
	}
	for i, e := range hard.Entries {
		for r, rule := range e.Rules {
			last := r == matcher.MaxRules-1
			if rule.Match(frame) == last {
				t.Errorf("ruleset %d rule %d: %v", i, r, !last)
			}
			// Rulesets end in the last fields of the index.
			at := slices.IndexFunc(x.Fields, func(f matcher.IndexField) bool { return f.Index == rule.Index && f.Mask == rule.Mask })
			if last != (at >= len(x.Fields)-matcher.MaxRulesets) {
				t.Errorf("ruleset %d rule %d is field %d", i, r, at)
			}
		}
	}
}

func TestAllocationsBelowTheStrayOnesAreNone(t *testing.T) {
	for x, met := range map[float64]bool{0: true, 0.0009: true, 0.0011: false, 1: false} {
		row, err := allocsRow([]float64{x})
		if err != nil || *row.Met != met || *row.Target != strayAllocs || row.Median != x {
			t.Errorf("%g: %+v, error %v", x, row, err)
		}
	}
}

func TestPeerIsBuiltOnceAndErrorsOfTheCompilerAreTold(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("no C compiler")
	}
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	path, err := buildPeer(t.Context(), "xsk_rx", peers.XSKReceive)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(path)
	if err != nil || before.Mode()&0o100 == 0 || filepath.Dir(path) != filepath.Join(cache, "xspin") {
		t.Fatalf("%s: mode %v, error %v", path, before.Mode(), err)
	}
	again, err := buildPeer(t.Context(), "xsk_rx", peers.XSKReceive)
	after, _ := os.Stat(again)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("built %s, then %s, error %v", path, again, err)
	}
	if left, _ := filepath.Glob(filepath.Join(cache, "xspin", "*")); len(left) != 1 {
		t.Errorf("cache has %v", left)
	}

	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "cc"), []byte("#!/bin/sh\necho no headers; exit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	if _, err := buildPeer(t.Context(), "xsk_rx", peers.XSKReceive); err == nil || !strings.Contains(err.Error(), "no headers") {
		t.Errorf("error %v", err)
	}
}

func TestCostOfAProcessIsRead(t *testing.T) {
	used := func() time.Duration {
		var r unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
			t.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	for used() < 100*time.Millisecond { // enough to tell from nothing
	}
	const ticks = 20 * time.Millisecond // user and system time are both rounded
	before := used()
	got, err := cpuTime(os.Getpid())
	if after := used(); err != nil || got < before-ticks || got > after+ticks {
		t.Errorf("%v, not between %v and %v, error %v", got, before, after, err)
	}
	if mib, err := resident(os.Getpid()); err != nil || mib < 1 || mib > 10000 {
		t.Errorf("%g MiB, error %v", mib, err)
	}
	if _, err := cpuTime(-1); err == nil {
		t.Error("time of no process")
	}
	if _, err := resident(-1); err == nil {
		t.Error("memory of no process")
	}
}

// judged has a benchmark judge flags: by line of flags, what the error says, or nothing if
// they are good.
func judged(t *testing.T, flags func(*pflag.FlagSet) func() (measureFunc, error), lines map[string]string) {
	t.Helper()
	for line, want := range lines {
		fl := pflag.NewFlagSet("bench", pflag.ContinueOnError)
		judge := flags(fl)
		if err := fl.Parse(strings.Fields(line)); err != nil {
			t.Fatal(err)
		}
		measure, err := judge()
		if want == "" {
			if err != nil || measure == nil {
				t.Errorf("%s: error %v", line, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", line, err, want)
		}
	}
}
