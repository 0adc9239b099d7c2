// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/ddt/ddttest"
	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
)

// spoil is the environment variable that has the sender do something wrong.
const spoil = "XSPIN_TEST_SPOIL"

// The demo starts an application and a sender. Here they are this executable.
func TestMain(m *testing.M) {
	switch os.Getenv(spoil) {
	case "byte":
		makeStream = func(l *layout, message int) ([]byte, error) {
			stream, err := l.pack(message)
			stream[len(stream)/2] ^= 1
			return stream, err
		}
	case "length":
		makeStream = func(l *layout, message int) ([]byte, error) {
			stream, err := l.pack(message)
			return stream[:len(stream)-1], err
		}
	case "swap": // messages 2 and 3
		makeStream = func(l *layout, message int) ([]byte, error) {
			if message >= 2 {
				message ^= 1
			}
			return l.pack(message)
		}
	}
	main := Main
	if len(os.Args) == 3 && os.Args[1] == "_send" {
		main = sendMain
	}
	if ok, err := main(os.Args[1:]); ok {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// sendMain is what `xspin demo datatypes --send` does, until stdin ends.
func sendMain(args []string) (bool, error) {
	var o struct {
		Local netip.AddrPort
		Transfer
	}
	if err := json.Unmarshal([]byte(args[1]), &o); err != nil {
		return true, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return true, Send(ctx, o.Local, o.Transfer, func() { fmt.Println("ready") }, func(r Request) { fmt.Println(r) })
}

const (
	simple  = "ctg(27648)[float]"
	complx  = "hvec(2 1 18432)[hvec(2 1 12288)[hvec(2 1 6144)[vec(32 6 8)[ctg(18)[float]]]]]"
	strided = "vec(64 3 7)[int]"
	// Reaches before the buffer's origin.
	backwards = "hvec(40 1 -48)[hidx(-8,3 5,2)[short]]"
)

func setup() Setup { return Setup{HPUs: 4, Wait: "adaptive", AppCPU: -1, SenderCPU: -1} }

func session(t *testing.T, lab *netns.Lab, transfers ...Transfer) *Session {
	t.Helper()
	s, err := Open(t.Context(), lab, setup(), transfers...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestEveryByteIsWhereItMustBe(t *testing.T) {
	t.Parallel()
	lab := netnstest.Temp(t, netns.LabConfig{})
	var transfers []Transfer
	for _, parallel := range []int{1, 16} {
		for _, text := range []string{simple, complx, strided, backwards} {
			transfers = append(transfers, Transfer{Type: text, Count: 2, Parallel: parallel, Strategy: ddt.Direct})
		}
	}
	for _, strategy := range append(ddt.Strategies(), Deposit) {
		text := complx
		if strategy == ddt.Specialized { // for flat types
			text = "vec(5000 3 7)[int]"
		}
		transfers = append(transfers, Transfer{Type: text, Count: 1, Parallel: 3, Strategy: strategy})
	}
	transfers = append(transfers, Transfer{Type: complx, Count: 2, Parallel: 3, Strategy: ddt.RWCP, Interval: 5000})
	for i := range 8 {
		typ, count := ddttest.Random(rand.New(rand.NewPCG(5, uint64(i))), ddttest.Options{MaxBytes: 20_000})
		if typ.Size() > 0 && count > 0 {
			transfers = append(transfers, Transfer{Type: typ.String(), Count: count, Parallel: 1 + i, Strategy: ddt.Direct})
		}
	}
	s := session(t, lab, transfers...)
	for turn := range 2 {
		for i, tr := range transfers {
			r, err := s.Verify(t.Context(), i)
			if err != nil {
				t.Fatalf("turn %d, %s, %d at a time, %s: %v", turn, tr.name(), tr.Parallel, tr.Strategy, err)
			}
			info := s.Info(i)
			packets := uint64(tr.Parallel) * uint64((info.Message+1461)/1462)
			if r.Bytes != info.Message*int64(tr.Parallel) || r.Messages != tr.Parallel || r.Segments != packets ||
				r.Took <= 0 || r.NIC <= 0 || r.NIC > r.Took+time.Millisecond || r.CPU.NIC <= 0 || r.CPU.App <= 0 || r.CPU.Sender <= 0 {
				t.Errorf("%+v: %+v, want %d packets", info, r, packets)
			}
			switch {
			case tr.Strategy == Deposit:
				if r.Packets != 0 || r.Copies != 0 || info.Placement != (ddt.Memory{}) {
					t.Errorf("%+v: %+v", info, r)
				}
			case r.Packets != packets || r.Copies < packets || info.Placement.Type <= 0:
				t.Errorf("%+v: %+v, want %d packets", info, r, packets)
			}
		}
	}
}

// What must be where is known by the definitions of MPI, too.
func TestWhatIsExpectedIsWhatTheDefinitionsSay(t *testing.T) {
	for i := range 60 {
		typ, count := ddttest.Random(rand.New(rand.NewPCG(6, uint64(i))), ddttest.Options{MaxBytes: 3000, MaxExtent: 1 << 16})
		if typ.Size() == 0 || count == 0 {
			continue
		}
		l, err := newLayout(Transfer{Type: typ.String(), Count: count, Parallel: 3, Strategy: ddt.Direct})
		if err != nil {
			t.Fatal(err)
		}
		window := make([]byte, l.window())
		l.clear(window, 0, l.window())
		for place := range 3 {
			stream, err := l.pack(place)
			if err != nil {
				t.Fatal(err)
			}
			for k, at := range ddttest.Places(typ, count) {
				if b := sent(place, at-min(l.lo, 0)); stream[k] != b {
					t.Fatalf("%s: byte %d of message %d's stream is %d, want %d", typ, k, place, stream[k], b)
				}
				window[l.origin(place)+at] = stream[k]
			}
		}
		for place := range 3 {
			if err := l.compare(window, place, place); err != nil {
				t.Errorf("%s: %v", typ, err)
			}
			// And any other byte is seen.
			from, to := l.around(place)
			for _, at := range []int64{from, to - 1, l.origin(place), from + rand.Int64N(to-from)} {
				window[at]++
				if err := l.compare(window, place, place); !errors.Is(err, ErrContents) {
					t.Errorf("%s: byte %d is another: %v", typ, at, err)
				}
				window[at]--
			}
		}
	}
}

func TestWrongBytesAreFound(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	before := left(t)
	c := Config{Setup: setup(), Transfers: []Transfer{{Type: strided, Count: 20, Parallel: 2, Strategy: ddt.Direct}}, Runs: 1, Verify: true}
	t.Run("a byte", func(t *testing.T) {
		t.Setenv(spoil, "byte")
		r, err := Run(t.Context(), lab, c, nil)
		if !errors.Is(err, ErrContents) || !strings.Contains(err.Error(), "of the type") || !strings.Contains(err.Error(), strided) {
			t.Errorf("error %v", err)
		}
		if len(r.Results) != 1 || r.Results[0].Verified == nil || *r.Results[0].Verified {
			t.Errorf("results %+v", r.Results)
		}
		var text strings.Builder
		if err := r.WriteText(&text); err != nil || !strings.Contains(text.String(), "NO") {
			t.Errorf("error %v\n%s", err, text.String())
		}
	})
	t.Run("another message", func(t *testing.T) {
		t.Setenv(spoil, "swap")
		c := c
		c.Transfers = []Transfer{{Type: strided, Count: 20, Parallel: 4, Strategy: ddt.Direct}}
		if _, err := Run(t.Context(), lab, c, nil); !errors.Is(err, ErrContents) || !strings.Contains(err.Error(), "message 2 of the round") && !strings.Contains(err.Error(), "message 3 of the round") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("nobody looks", func(t *testing.T) {
		t.Setenv(spoil, "byte")
		c := c
		c.Verify = false
		if r, err := Run(t.Context(), lab, c, nil); err != nil || r.Results[0].Verified != nil {
			t.Errorf("error %v, results %+v", err, r.Results)
		}
	})
	t.Run("a message that is too short", func(t *testing.T) {
		t.Setenv(spoil, "length")
		_, err := Run(t.Context(), lab, c, nil)
		for _, want := range []string{"application: ", "15359", "15360"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("no %q in error %v", want, err)
			}
		}
	})
	if after := left(t); !slices.Equal(before, after) {
		t.Errorf("directories before %v, and now %v", before, after)
	}
}

// left lists directories of demos.
func left(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), "xspin-d*"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(dirs, func(d string) bool {
		return !strings.Contains(d, fmt.Sprintf("datatypes-%d-", os.Getpid())) && !strings.Contains(d, fmt.Sprintf("demo-%d-", os.Getpid()))
	})
}

func TestBadNetworksLoseNothing(t *testing.T) {
	t.Parallel()
	lab := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Loss: 0.1, Duplicate: 0.05, Seed: 3}})
	s := session(t, lab, Transfer{Type: strided, Count: 7, Parallel: 4, Strategy: ddt.Direct})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	again := uint64(0)
	for range 8 { // of so many requests some are lost, too, as a rule
		r, err := s.Verify(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		again += r.Retransmitted
	}
	if again == 0 {
		t.Error("nothing was sent again")
	}
}

func TestWhoEndsIsNamed(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	before := left(t)
	for _, tc := range []struct {
		name string
		kill func(*Session) error
		want string
	}{
		{"the application", func(s *Session) error { return s.attached.Kill() }, "application: helper process failed: signal: killed"},
		{"the sender", func(s *Session) error { return s.process.Kill() }, "sender: helper process failed: signal: killed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s, err := Open(ctx, lab, setup(), Transfer{Type: simple, Count: 20, Parallel: 16, Strategy: ddt.Direct})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Round(ctx, 0); err != nil {
				t.Fatal(err)
			}
			// In the middle of a round, as a rule.
			time.AfterFunc(20*time.Millisecond, func() {
				if err := tc.kill(s); err != nil {
					t.Error(err)
				}
			})
			for err == nil {
				_, err = s.Round(ctx, 0)
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("an end in the middle", func(t *testing.T) {
		s, err := Open(t.Context(), lab, setup(), Transfer{Type: complx, Count: 20, Parallel: 16, Strategy: ddt.Direct})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, err := s.Round(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(5*time.Millisecond, cancel)
		for err == nil {
			_, err = s.Overlap(ctx, 0, GEMMs{N: 300, Count: 20})
		}
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		begun := time.Now()
		if err := s.Close(); err != nil || time.Since(begun) > 20*time.Second {
			t.Errorf("error %v after %v", err, time.Since(begun))
		}
	})
	if links, err := rtt.ReadLinks(lab); err != nil || links[0].XDP != "none" {
		t.Errorf("error %v, links %+v", err, links)
	}
	if after := left(t); !slices.Equal(before, after) {
		t.Errorf("directories before %v, and now %v", before, after)
	}
}

func TestRunMeasures(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	c := Config{Setup: setup(), Runs: 3, Verify: true, Overlap: true}
	for _, strategy := range []string{ddt.Direct, Deposit} {
		c.Transfers = append(c.Transfers, Transfer{Name: "milc", Type: complx, Count: 4, Parallel: 4, Strategy: strategy})
	}
	var told []string
	r, err := Run(t.Context(), lab, c, func(s string) { told = append(told, s) })
	if err != nil {
		t.Fatal(err)
	}
	if len(told) != 4 {
		t.Errorf("progress %q", told)
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Schema  int
		Env     map[string]any
		Results []map[string]any
		Notes   []string
	}
	if err := json.Unmarshal(b.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Schema != 1 || len(doc.Results) != 2 {
		t.Fatalf("document %+v", doc)
	}
	for _, key := range []string{"kernel", "cpu", "cpus", "go", "mtu", "queues", "hpus", "nic_wait", "nic_cpus", "app_cpu", "sender_cpu", "runs", "load", "links"} {
		if v := doc.Env[key]; v == nil || v == "" {
			t.Errorf("env has %s = %v", key, v)
		}
	}
	figure := func(where string, v any) {
		t.Helper()
		f, _ := v.(map[string]any)
		ci, _ := f["ci95"].([]any)
		if f == nil || len(ci) != 2 || f["median"].(float64) <= 0 && where != "hidden" || ci[0].(float64) > ci[1].(float64) {
			t.Errorf("%s: %v", where, v)
		}
	}
	// 442,368 bytes a message, in 303 packets.
	for i, res := range doc.Results {
		for key, want := range map[string]any{
			"type": "milc", "text": complx, "strategy": []string{ddt.Direct, Deposit}[i], "tier": "user", "elements": 4.0, "parallel": 4.0,
			"message_bytes": 442368.0, "round_bytes": 4 * 442368.0, "segments": 3 * 1212.0, "packets": []any{1212.0, 0.0}[i],
			"blocks": []any{1024.0, 1.0}[i], "verified": true, "span_bytes": []any{220608.0, 442368.0}[i],
		} {
			if res[key] != want {
				t.Errorf("result %d: %s is %v, want %v", i, key, res[key], want)
			}
		}
		for _, key := range []string{"gbps", "seconds", "nic_seconds"} {
			figure(key, res[key])
		}
		if m := res["placement_memory"].(map[string]any); (m["total"].(float64) > 0) != (i == 0) {
			t.Errorf("result %d: placement %v", i, m)
		}
		o, _ := res["overlap"].(map[string]any)
		if o == nil || o["gemms"] != 20.0 || o["n"].(float64) < leastMatrix || o["gflops"].(float64) <= 0 {
			t.Fatalf("result %d: overlap %v", i, o)
		}
		for _, key := range []string{"gemms_s", "transfer_s", "both_s", "nic_s", "hidden", "gemms_slower", "transfer_slower", "nic_slower", "fpspin_ratio"} {
			figure(key, o[key])
		}
		if ratio := o["fpspin_ratio"].(map[string]any)["median"].(float64); ratio > 1 {
			t.Errorf("result %d: ratio %g", i, ratio)
		}
	}
	if g, want := doc.Env["gemm"], map[string]any{"library": "gonum", "threads": 1.0}; !reflect.DeepEqual(g, want) {
		t.Errorf("env has gemm = %v, want %v", g, want)
	}

	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(text.String(), "\n") {
		if n := utf8.RuneCountInString(line); n > 120 && !strings.HasPrefix(line, "note:") {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	for _, want := range []string{"milc", "deposit", "4 of 432 KiB", "yes", "hidden", "FPsPIN's ratio", "checksums partial", "packed before"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	t.Logf("\n%s", text.String())
}

// The interval comes from the model, with times of this machine, unless it is said.
func TestTheModelHasTimesOfThisMachine(t *testing.T) {
	t.Parallel()
	lab := netnstest.Temp(t, netns.LabConfig{})
	tr := Transfer{Name: "x", Type: complx, Count: 4, Parallel: 4, Strategy: ddt.ROCP}
	said := tr
	said.Strategy, said.Interval = ddt.RWCP, 5000
	r, err := Run(t.Context(), lab, Config{Setup: setup(), Runs: 1, Transfers: []Transfer{tr, said}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	res := r.Results[0]
	if m := res.Model; m == nil || m.PacketTime < 1 || m.PacketTime > int64(time.Second) || m.Handler < 1 || res.Interval < 1462 || res.Interval%1462 != 0 {
		t.Errorf("%+v, model %+v", res, m)
	}
	if n := res.Placement.Checkpoints; n == 0 {
		t.Errorf("placement %+v", res.Placement)
	}
	if res := r.Results[1]; res.Model != nil || res.Interval != 4*1462 { // whole packets
		t.Errorf("%+v, model %+v", res, res.Model)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("x, ro-cp: a checkpoint every %d bytes, for a packet every %d ns", res.Interval, res.Model.PacketTime); !strings.Contains(text.String(), want) || strings.Count(text.String(), "checkpoint") != 1 {
		t.Errorf("no %q in\n%s", want, text.String())
	}
}

func TestConfigsThatCannotBeMeant(t *testing.T) {
	for _, change := range []func(*Config){
		func(c *Config) { c.Transfers = nil },
		func(c *Config) { c.Runs = 0 },
		func(c *Config) { c.Runs = MaxRuns + 1 },
		func(c *Config) { c.Transfers[0].Count = -1 },
		func(c *Config) { c.Transfers[0].Count = 1 << 32 },
		func(c *Config) { c.Transfers[0].Parallel = 0 },
		func(c *Config) { c.Transfers[0].Parallel = MaxParallel + 1 },
		func(c *Config) { c.Transfers[0].Strategy = "" },
		func(c *Config) { c.Transfers[0].Strategy = "magic" },
		func(c *Config) { c.Transfers[0].Type, c.Transfers[0].Strategy = complx, ddt.Specialized },
		func(c *Config) { c.Transfers[0].Interval = -1 },
		func(c *Config) { c.Transfers[0].Type = "ctg(0)[int]" },
		func(c *Config) { c.Transfers[0].Type, c.Transfers[0].Strategy = "ctg(1100000000)[int]", Deposit },
		func(c *Config) { c.Transfers[0].Type = "hvec(2 1 5000000000)[int]" },
		func(c *Config) { c.Transfers[0].Type = "hvec(2 1 -5000000000)[int]" },
		func(c *Config) {
			c.Transfers[0].Type, c.Transfers[0].Strategy = "hvec(2 1 5000000000)[int]", Deposit // the sender's buffer
		},
		func(c *Config) { c.Transfers[0].Type, c.Transfers[0].Parallel = "ctg(5000000)[int]", 1000 },
	} {
		c := Config{Setup: setup(), Runs: 1, Transfers: []Transfer{{Type: strided, Parallel: 1, Strategy: ddt.Direct}}}
		change(&c)
		if r, err := Run(t.Context(), nil, c, nil); !errors.Is(err, ErrConfig) {
			t.Errorf("error %v, report %v", err, r)
		}
	}
	c := Config{Setup: setup(), Runs: 1, Transfers: []Transfer{{Type: "vec(4", Parallel: 1, Strategy: ddt.Direct}}}
	var syntax *ddt.SyntaxError
	if _, err := Run(t.Context(), nil, c, nil); !errors.As(err, &syntax) {
		t.Errorf("error %v", err)
	}
}

func TestServeTakesWhatIsSent(t *testing.T) {
	t.Parallel()
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(dir, rtt.Nobody, -1); err != nil {
		t.Fatal(err)
	}
	tr := Transfer{Type: backwards, Count: 30, Parallel: 2, Strategy: ddt.Direct}
	l, err := newLayout(tr)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := l.pack(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var got []Message
	var sending sync.WaitGroup
	// Six messages, more than there are places. One has a wrong byte, one a wrong length.
	err = Serve(ctx, lab, ServeConfig{Setup: setup(), Transfer: tr, Verify: true, Dir: dir}, func(Info) {
		var patient, hasty *slmp.Conn
		if err := lab.Host.NS.Do(func() (err error) {
			to := lab.NIC.Addr.Addr().String()
			if patient, err = slmp.Dial(ctx, to, slmp.Config{}); err != nil {
				return err
			}
			hasty, err = slmp.Dial(ctx, to, slmp.Config{Retries: 1, Patience: time.Second})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		sending.Go(func() {
			defer patient.Close()
			defer hasty.Close()
			wrong := bytes.Clone(stream)
			wrong[5] ^= 1
			for i, msg := range [][]byte{stream, stream, stream, wrong, stream[1:], stream} {
				conn := patient
				if i == 4 { // which is not acknowledged
					conn = hasty
				}
				if _, err := conn.SendBytes(ctx, msg, slmp.Options{}); (err == nil) != (i != 4) {
					t.Errorf("message %d: %v", i, err)
				}
			}
		})
	}, func(m Message) {
		if got = append(got, m); len(got) == 6 {
			sending.Wait() // the last one knows that it was taken
			cancel()
		}
	})
	if err != nil || len(got) != 6 {
		t.Fatalf("error %v, told of %d", err, len(got))
	}
	for i, m := range got {
		wrong := map[int]string{3: "not what the demo's or FPsPIN's sender sends for this type: " + ErrContents.Error(), 4: "11999"}[i]
		if m.Verified != (wrong == "") || !strings.Contains(m.Err, wrong) || m.Source.Addr() != lab.Host.Addr.Addr() {
			t.Errorf("message %d: %+v, want %q", i, m, wrong)
		}
		if wrong != "" {
			continue
		}
		have, err := os.ReadFile(m.File)
		if err != nil || int64(len(have)) != l.hi-l.lo {
			t.Fatalf("message %d: %d bytes of %d, error %v", i, len(have), l.hi-l.lo, err)
		}
		if at, b := -l.lo-8, sent(0, -8-l.lo); have[at] != b {
			t.Errorf("message %d: the first block begins with %d, want %d", i, have[at], b)
		}
	}
}

func TestSendersAreAsked(t *testing.T) {
	t.Parallel()
	lab := netnstest.Temp(t, netns.LabConfig{})
	tr := Transfer{Type: strided, Count: 30, Parallel: 3, Strategy: ddt.Direct}
	asked := netip.AddrPortFrom(lab.Host.Addr.Addr(), RequestPort)
	// The sender is asked for another count than it was started with.
	p, err := rtt.Start("_send", map[string]any{"Local": asked, "Type": strided, "Count": 7}, rtt.ProcessOptions{NS: lab.Host.NS, User: rtt.Nobody})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Stop(nil); err != nil {
			t.Error(err)
		}
	}()
	said := make([]byte, 6)
	if _, err := io.ReadFull(p.Stdout, said); err != nil || string(said) != "ready\n" {
		t.Fatalf("%q, error %v", said, p.Stop(err))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	n := 0
	if err := Serve(ctx, lab, ServeConfig{Setup: setup(), Transfer: tr, Sender: asked, Verify: true}, func(i Info) {
		if i.Message != 30*64*3*4 {
			t.Errorf("info %+v", i)
		}
	}, func(m Message) {
		if !m.Verified {
			t.Errorf("message %+v", m)
		}
		if n++; n == tr.Parallel {
			cancel()
		}
	}); err != nil || n != tr.Parallel {
		t.Errorf("error %v, %d messages", err, n)
	}
	t.Run("a directory that is none", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		ready := func(Info) {
			t.Error("serves")
			cancel()
		}
		err := Serve(ctx, lab, ServeConfig{Setup: setup(), Transfer: tr, Dir: t.TempDir()}, ready, func(Message) {})
		if err == nil || !strings.Contains(err.Error(), "the application is user 65534") {
			t.Errorf("error %v", err)
		}
		for dir, want := range map[string]error{"/nowhere": fs.ErrNotExist, "/proc/version": unix.ENOTDIR} {
			if err := writable(dir); !errors.Is(err, want) {
				t.Errorf("%s: error %v, want %v", dir, err, want)
			}
		}
	})
	t.Run("nobody there", func(t *testing.T) {
		nobody := netip.AddrPortFrom(lab.Host.Addr.Addr(), 9)
		err := Serve(t.Context(), lab, ServeConfig{Setup: setup(), Transfer: tr, Sender: nobody}, func(Info) {}, func(Message) {})
		if err == nil || !strings.Contains(err.Error(), nobody.String()) {
			t.Errorf("error %v", err)
		}
	})
}

// A sender to which each request is another round, as to FPsPIN's, is asked again as long as
// nothing comes, and not while its message is on its way, however long that takes.
func TestSendersThatSendAreNotAskedAgain(t *testing.T) {
	t.Parallel()
	lab := netnstest.Temp(t, netns.LabConfig{})
	tr := Transfer{Type: strided, Count: 30, Parallel: 1, Strategy: ddt.Direct}
	l, err := newLayout(tr)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := l.pack(0)
	if err != nil {
		t.Fatal(err)
	}
	asked := netip.AddrPortFrom(lab.Host.Addr.Addr(), RequestPort)
	var requests *net.UDPConn
	var conn *slmp.Conn
	if err := lab.Host.NS.Do(func() (err error) {
		if requests, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(asked)); err != nil {
			return err
		}
		conn, err = slmp.Dial(t.Context(), lab.NIC.Addr.Addr().String(), slmp.Config{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	defer requests.Close()
	await := func(until time.Duration) error {
		if err := requests.SetReadDeadline(time.Now().Add(until)); err != nil {
			return err
		}
		_, err := requests.Read(make([]byte, requestLen))
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var sending sync.WaitGroup
	sending.Go(func() {
		for range 3 { // two are lost
			if err := await(20 * time.Second); err != nil {
				t.Error(err)
				cancel()
				return
			}
		}
		begun, late := make(chan struct{}), 0
		half, pipe := io.Pipe()
		sending.Go(func() {
			var once sync.Once
			o := slmp.Options{Progress: func(p slmp.Progress) {
				if p.Bytes > 0 {
					once.Do(func() { close(begun) })
				}
			}}
			if _, err := conn.Send(ctx, half, o); err != nil {
				t.Error(err)
			}
		})
		if _, err := pipe.Write(stream[:len(stream)/2]); err != nil {
			t.Error(err)
		}
		select {
		case <-begun:
		case <-ctx.Done():
			t.Error("the message does not begin")
			return
		}
		for end := time.Now().Add(15 * again); time.Now().Before(end); {
			if await(time.Until(end)) == nil {
				late++
			}
		}
		if late > 1 { // one may have been on its way
			t.Errorf("asked %d times again while a message came", late)
		}
		if _, err := pipe.Write(stream[len(stream)/2:]); err != nil {
			t.Error(err)
		}
		if err := pipe.Close(); err != nil {
			t.Error(err)
		}
	})
	n := 0
	err = Serve(ctx, lab, ServeConfig{Setup: setup(), Transfer: tr, Sender: asked, Verify: true}, func(Info) {}, func(m Message) {
		if n++; !m.Verified {
			t.Errorf("message %+v", m)
		}
		sending.Wait() // the sender knows that it was taken
		cancel()
	})
	cancel()
	sending.Wait()
	if err != nil || n != 1 {
		t.Errorf("error %v, %d messages", err, n)
	}
}

func TestRequestsAgainAreNotNewOnes(t *testing.T) {
	var failed atomic.Int32
	ended := make(chan struct{}, 100)
	s, err := listen(netip.MustParseAddrPort("127.0.0.1:0"), func(error) {
		failed.Add(1)
		ended <- struct{}{}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	asked := 0
	s.asked = func(request, netip.AddrPort) { asked++ }
	from, other := netip.MustParseAddrPort("127.0.0.77:40000"), netip.MustParseAddrPort("127.0.0.77:40001")
	if err := s.request(request{1, 1, 1}.append(nil), from); err == nil {
		t.Error("asked for nothing in particular")
	}
	if err := s.add(Transfer{Type: strided, Count: 1, Parallel: 1, Strategy: ddt.Direct}); err != nil {
		t.Fatal(err)
	}
	for i, tc := range []struct {
		b    []byte
		from netip.AddrPort
		want int // requests so far
	}{
		{request{2, 1, 7}.append(nil), from, 1},
		{request{2, 1, 7}.append(nil), from, 1},
		{request{2, 1, 7}.append(nil), other, 2},
		{request{2, 1, 8}.append(nil), from, 3},
		{request{2, 1, 8}.append(nil), from, 3},
		{request{2, 1, 8}.append(nil)[:8], from, 4}, // FPsPIN's
		{request{2, 1, 8}.append(nil)[:8], from, 5},
		{request{2, 3, 9}.append(nil), from, 6}, // three elements
	} {
		if err := s.request(tc.b, tc.from); err != nil || asked != tc.want {
			t.Errorf("request %d: %d taken, want %d, error %v", i, asked, tc.want, err)
		}
	}
	// Nobody receives the messages.
	for range 2 * 6 {
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Fatalf("%d messages are over", failed.Load())
		}
	}
	for _, b := range [][]byte{nil, make([]byte, 7), make([]byte, 9), make([]byte, 17), request{0, 1, 1}.append(nil), request{MaxParallel + 1, 1, 1}.append(nil), request{1, 0, 1}.append(nil)} {
		if err := s.request(b, from); err == nil {
			t.Errorf("% x is taken", b)
		}
	}
}
