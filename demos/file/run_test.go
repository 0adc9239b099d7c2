// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/slmp"
)

// The demo starts a sender. Here it is this executable, which says what
// `xspin send --json` does.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "_send" {
		if err := sendMain(os.Args[2], os.Args[3:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) == 3 && os.Args[1] == "_sync" {
		var c syncing
		err := json.Unmarshal([]byte(os.Args[2]), &c)
		if err = errors.Join(err, c.run()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if ok, err := Main(os.Args[1:]); ok {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func sendMain(how string, args []string) error {
	var cfg slmp.Config
	fl := flag.NewFlagSet("send", flag.ContinueOnError)
	fl.Bool("json", false, "")
	window := fl.String("window", "", "")
	parallel := fl.Int("parallel", 0, "")
	repeat := fl.Int("repeat", 0, "")
	to := fl.String("to", "", "")
	fl.BoolVar(&cfg.Plain, "plain", false, "")
	if err := fl.Parse(args); err != nil {
		return err
	}
	if *window != "auto" {
		n, err := strconv.Atoi(*window)
		if err != nil {
			return err
		}
		cfg.Window = n
	}
	if fl.NArg() != 1 || *parallel != *repeat {
		return fmt.Errorf("%d files, %d of %d at once", fl.NArg(), *parallel, *repeat)
	}
	data, err := os.ReadFile(fl.Arg(0))
	if err != nil {
		return err
	}
	switch how {
	case "wrong":
		data[len(data)/2] ^= 1
	case "impatient":
		cfg.Retries, cfg.MaxRTO = 1, 50*time.Millisecond
	}
	conn, err := slmp.Dial(context.Background(), *to, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()
	begun := time.Now()
	errs := make([]error, *repeat)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = conn.SendBytes(context.Background(), data, slmp.Options{}) })
	}
	wg.Wait()
	st := conn.Stats()
	fmt.Printf(`{"seconds": %g, "segments": %d, "retransmitted": %d, "rtt_us": {"smoothed": %g}}`,
		time.Since(begun).Seconds(), st.Segments, st.Retransmitted, float64(st.RTT)/1e3)
	return errors.Join(errs...)
}

func sender(t *testing.T, how string) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{self, "_send", how}
}

// serve starts a NIC that receives files for the test's time.
func serve(t *testing.T, lab *netns.Lab, cfg StoreConfig) (*Server, chan Received) {
	t.Helper()
	ended := make(chan Received, 1000)
	cfg.Ended = func(r Received) { ended <- r }
	s, err := Start(lab, ServerConfig{Store: cfg, HPUs: 4, Wait: "adaptive"})
	if err != nil {
		t.Fatal(err)
	}
	return s, ended
}

func dial(t *testing.T, lab *netns.Lab, cfg slmp.Config) *slmp.Conn {
	t.Helper()
	var conn *slmp.Conn
	if err := lab.Host.NS.Do(func() (err error) {
		conn, err = slmp.Dial(t.Context(), lab.NIC.Addr.Addr().String(), cfg)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func wait(t *testing.T, ended chan Received) Received {
	t.Helper()
	select {
	case r := <-ended:
		return r
	case <-time.After(20 * time.Second):
		t.Fatal("nothing is heard of the message")
	}
	panic("not reached")
}

func TestFilesOfAllSizesArriveAtTheSameTime(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	for _, plain := range []bool{false, true} {
		dir := t.TempDir()
		s, ended := serve(t, lab, StoreConfig{Dir: dir})
		conn := dial(t, lab, slmp.Config{Plain: plain})
		sizes := []int{0, 1, 1459, 1460, 1461, 1 << 20, 50 << 20}
		want := map[uint32]string{}
		var mu sync.Mutex
		var sending sync.WaitGroup
		for i, size := range sizes {
			data := noise(size, byte(i))
			sending.Go(func() {
				res, err := conn.SendBytes(t.Context(), data, slmp.Options{})
				if err != nil {
					t.Error(err)
				}
				// It is acknowledged, so the file is there.
				got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("%s-%d-%d", lab.Host.Addr.Addr(), conn.LocalAddr().Port(), res.ID)))
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("plain %t, %d bytes: file of %d bytes, error %v", plain, size, len(got), err)
				}
				mu.Lock()
				want[res.ID] = sumOf(data)
				mu.Unlock()
			})
		}
		sending.Wait()
		for range sizes {
			if r := wait(t, ended); r.Err != nil || r.SHA256 != want[r.Number] || r.Source.Addr() != lab.Host.Addr.Addr() {
				t.Errorf("plain %t: told %+v", plain, r)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if left := names(t, dir); len(left) != len(sizes) {
			t.Errorf("the directory has %v", left)
		}
	}
}

func TestWhatIsTooLongIsRefusedAndOthersAreNot(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := t.TempDir()
	s, ended := serve(t, lab, StoreConfig{Dir: dir, MaxSize: 100_000})
	conn := dial(t, lab, slmp.Config{Retries: 2, MaxRTO: 50 * time.Millisecond})
	if _, err := conn.SendBytes(t.Context(), noise(100_001, 1), slmp.Options{}); err == nil {
		t.Error("100,001 bytes sent")
	} else {
		t.Logf("the sender's error: %v", err)
	}
	if r := wait(t, ended); r.Err == nil || !strings.Contains(r.Err.Error(), "longer than 100000 bytes") {
		t.Errorf("told %+v", r)
	}
	data := noise(100_000, 2)
	if _, err := conn.SendBytes(t.Context(), data, slmp.Options{}); err != nil {
		t.Error(err)
	}
	if r := wait(t, ended); r.Err != nil || r.SHA256 != sumOf(data) {
		t.Errorf("told %+v", r)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left := names(t, dir); len(left) != 1 {
		t.Errorf("the directory has %v", left)
	}
}

// A disk that stalls for longer than handlers may take elsewhere.
func TestSlowDiskStopsNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	lab := netnstest.Temp(t, netns.LabConfig{})
	s, ended := serve(t, lab, StoreConfig{Dir: t.TempDir()})
	conn := dial(t, lab, slmp.Config{Patience: 30 * time.Second})
	data := noise(1<<20, 1)
	begun, more := make(chan struct{}), make(chan struct{})
	var sending sync.WaitGroup
	sending.Go(func() {
		half := len(data) / 2
		r := io.MultiReader(bytes.NewReader(data[:half]), &signal{begun, more}, bytes.NewReader(data[half:]))
		if _, err := conn.Send(t.Context(), r, slmp.Options{}); err != nil {
			t.Error(err)
		}
	})
	<-begun
	var in *incoming
	for end := time.Now().Add(20 * time.Second); in == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no message comes")
		}
		s.store.mu.Lock()
		for in = range s.store.live {
		}
		s.store.mu.Unlock()
	}
	in.mu.Lock() // as a handler has it that waits for the disk
	close(more)
	time.Sleep(hpu.DefaultLimit * 3 / 2)
	in.mu.Unlock()
	sending.Wait()
	if r := wait(t, ended); r.Err != nil || r.SHA256 != sumOf(data) {
		t.Errorf("told %+v", r)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// signal is no bytes: it tells that it was read, and ends when it may.
type signal struct{ begun, more chan struct{} }

func (r *signal) Read([]byte) (int, error) {
	close(r.begun)
	<-r.more
	return 0, io.EOF
}

// trickle is a file that never ends: it gives a piece, and then waits.
type trickle struct {
	first []byte
	gone  <-chan struct{}
}

func (r *trickle) Read(b []byte) (int, error) {
	if n := copy(b, r.first); n > 0 {
		r.first = r.first[n:]
		return n, nil
	}
	<-r.gone
	return 0, io.ErrUnexpectedEOF
}

func TestInterruptedMessagesLeaveNothing(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	dir := t.TempDir()
	s, ended := serve(t, lab, StoreConfig{Dir: dir, Timeout: 300 * time.Millisecond})
	for _, size := range []int{1500, 1 << 20} {
		conn := dial(t, lab, slmp.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		_, err := conn.Send(ctx, &trickle{noise(size, 1), t.Context().Done()}, slmp.Options{Progress: func(p slmp.Progress) {
			if p.Bytes > 0 {
				cancel()
			}
		}})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("sender: %v", err)
		}
		if r := wait(t, ended); r.Err == nil || !strings.Contains(r.Err.Error(), "timed out: its end is missing") {
			t.Errorf("told %+v", r)
		}
	}
	if left := names(t, dir); len(left) != 0 {
		t.Errorf("the directory has %v", left)
	}

	t.Run("by the receiver", func(t *testing.T) {
		conn := dial(t, lab, slmp.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		arrived := make(chan struct{})
		var once sync.Once
		var sending sync.WaitGroup
		sending.Go(func() {
			_, _ = conn.Send(ctx, &trickle{noise(1<<20, 1), t.Context().Done()}, slmp.Options{Progress: func(p slmp.Progress) {
				if p.Bytes > 0 {
					once.Do(func() { close(arrived) })
				}
			}})
		})
		select {
		case <-arrived:
		case <-time.After(10 * time.Second):
			t.Error("nothing arrives")
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if r := wait(t, ended); r.Err == nil || r.Path != "" {
			t.Errorf("told %+v", r)
		}
		cancel()
		sending.Wait()
		if left := names(t, dir); len(left) != 0 {
			t.Errorf("the directory has %v", left)
		}
	})
}

func config(t *testing.T, how string) Config {
	return Config{
		Size: 3 << 20, Runs: 2, Parallel: 2, Into: []Into{IntoFile}, Window: "auto", Sender: sender(t, how), SenderCPU: -1,
		Server: ServerConfig{HPUs: 4, Wait: "adaptive", Store: StoreConfig{Dir: t.TempDir(), MaxSize: 3 << 20}},
	}
}

func TestRunComparesWhatHasArrivedAndMeasures(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	c := config(t, "right")
	c.Keep, c.Into = true, Intos
	if err := os.Chown(c.Server.Store.Dir, rtt.Nobody, -1); err != nil {
		t.Fatal(err)
	}
	reachable(t, c.Server.Store.Dir)
	var told []string
	r, err := Run(t.Context(), lab, c, func(s string) { told = append(told, s) })
	if err != nil {
		t.Fatal(err)
	}
	if len(told) != 14 {
		t.Errorf("progress told %d times, want 14: %q", len(told), told)
	}
	if left := names(t, c.Server.Store.Dir); len(left) != 2 || len(r.Files) != 2 {
		t.Errorf("kept %v, the directory has %v", r.Files, left)
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Schema  int
		Env     map[string]any
		Size    int64
		SHA256  string
		Results []map[string]any
	}
	if err := json.Unmarshal(b.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Schema != 1 || doc.Size != c.Size || len(doc.SHA256) != 64 || len(doc.Results) != 7 {
		t.Fatalf("document %+v", doc)
	}
	for _, key := range []string{"kernel", "cpus", "go", "mtu", "queues", "hpus", "nic_wait", "nic_cpus", "sender_cpu", "window", "dir"} {
		if v := doc.Env[key]; v == nil || v == "" {
			t.Errorf("env has %s = %v", key, v)
		}
	}
	for i, res := range doc.Results {
		mode := modes[i]
		g := res["gbps"].(map[string]any)
		order := []float64{0, g["min"].(float64), g["median"].(float64), g["max"].(float64)}
		if res["mode"] != string(mode) || !slices.IsSorted(order) || order[1] == 0 || len(res["seconds"].([]any)) != 2 {
			t.Errorf("result %d: %v", i, res)
		}
		nicEnd := res["links"].([]any)[0].(map[string]any)
		hostEnd := res["links"].([]any)[1].(map[string]any)
		attached := mode != TCP && mode != TC
		if (nicEnd["xdp"] == "native") != attached || hostEnd["tso"] == attached || (hostEnd["xdp"] == "native") != (mode == XDP) {
			t.Errorf("result %d: ends %v, %v", i, nicEnd, hostEnd)
		}
		// 3 MiB take 2152 segments of 1462 bytes, twice in two runs.
		if n, _ := res["segments"].(float64); mode != TCP && mode != TCPFrames {
			if n < 4*2152 || len(res["rtt_us"].([]any)) != 2 {
				t.Errorf("result %d: %v", i, res)
			}
		}
	}

	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(text.String(), "\n") {
		if n := utf8.RuneCountInString(line); n > 112 && !strings.Contains(line, c.Server.Store.Dir) {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	for _, want := range []string{"3 MiB, 2 times at once", "SLMP, aggregated", "SLMP, one", "same frames", "no XDP", "SLMP / TCP", "into a window / TCP", "handlers in eBPF at xdp / in Go", "handlers in eBPF at tc / in Go", "into an application's window, at tc ", "at tc / TCP without XDP: ", "by XDP / TCP", "SLMP, into an application's window, by XDP ", "/ TCP with the same frames: ", ", / TCP without XDP: ", "XDP takes TSO from", "median of 2 runs, and the least and most of them; sent again: in all runs together", "that time is not in the figures)\n", "checksums partial", doc.SHA256, "kept: "} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	t.Logf("\n%s", text.String())
}

func TestRunTellsWhatWentWrong(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	before := left(t)
	// Of a demo that was killed, and of one that has the number of a process.
	gone, err := os.MkdirTemp(memory(), fmt.Sprintf("xspin-file-%d-", 1<<30))
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(gone)
	other, err := os.MkdirTemp(memory(), "xspin-file-1-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(other)
	t.Run("other contents", func(t *testing.T) {
		if _, err := Run(t.Context(), lab, config(t, "wrong"), nil); !errors.Is(err, ErrContents) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a file that is too long", func(t *testing.T) {
		c := config(t, "impatient")
		c.Server.Store.MaxSize = 1 << 20
		_, err := Run(t.Context(), lab, c, nil)
		for _, want := range []string{"sender: ", "receiver: ", "longer than 1048576 bytes"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("no %q in error %v", want, err)
			}
		}
	})
	t.Run("a sender that is not there", func(t *testing.T) {
		c := config(t, "right")
		c.Sender = []string{"/nonexistent/xspin", "send"}
		if _, err := Run(t.Context(), lab, c, nil); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("no iperf3", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		r, err := Run(t.Context(), lab, config(t, "right"), nil)
		if err != nil || len(r.Results) != 2 || len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "iperf3") {
			t.Errorf("error %v, report %+v", err, r)
		}
	})
	t.Run("an end in the middle", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		r, err := Run(ctx, lab, config(t, "right"), func(string) {
			if n++; n == 3 {
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) || len(r.Results) != 2 {
			t.Errorf("error %v, %d results", err, len(r.Results))
		}
	})
	t.Run("configs that cannot be meant", func(t *testing.T) {
		for _, change := range []func(*Config){
			func(c *Config) { c.Size = -1 },
			func(c *Config) { c.Size = slmp.MaxMessage + 1 },
			func(c *Config) { c.Runs = 0 },
			func(c *Config) { c.Parallel = 0 },
			func(c *Config) { c.Into = nil },
			func(c *Config) { c.Sender = nil },
			func(c *Config) { c.Keep, c.Server.Store.Dir = true, "" },
		} {
			c := config(t, "right")
			change(&c)
			if _, err := Run(t.Context(), lab, c, nil); !errors.Is(err, ErrConfig) {
				t.Errorf("error %v", err)
			}
		}
	})
	if after := left(t); !slices.Equal(slices.Sorted(slices.Values(append(before, other))), after) {
		t.Errorf("directories before %v, and now %v", before, after)
	}
}

// left lists directories of demos.
func left(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(memory(), "xspin-file-*"))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

func TestServeReceivesUntilItsContextEnds(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	var got []Received
	data := noise(100_000, 1)
	err := Serve(ctx, lab, ServerConfig{HPUs: 2, Wait: "sleep", Store: StoreConfig{Dir: t.TempDir(), Ended: func(r Received) { got = append(got, r) }}}, func(int, string) {
		conn := dial(t, lab, slmp.Config{})
		if _, err := conn.SendBytes(ctx, data, slmp.Options{}); err != nil {
			t.Error(err)
		}
		cancel()
	})
	// What was acknowledged was told of, however soon the end came.
	if err != nil || len(got) != 1 || got[0].SHA256 != sumOf(data) {
		t.Errorf("error %v, received %+v", err, got)
	}
}
