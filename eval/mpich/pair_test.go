// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

func parse(t testing.TB, text string) *ddt.Type {
	t.Helper()
	typ, err := ddt.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return typ
}

var buildable = map[Library]func() error{MPICH: onceBuilt(MPICH), OpenMPI: onceBuilt(OpenMPI)}

func onceBuilt(l Library) func() error {
	return sync.OnceValue(func() error {
		dir, err := os.MkdirTemp("", "mpich")
		if err != nil {
			return err
		}
		_, err = l.build(context.Background(), dir, "mpi_unpack")
		return errors.Join(err, os.RemoveAll(dir))
	})
}

func needMPICH(t testing.TB) { need(t, MPICH) }

// need skips where there is no such library.
func need(t testing.TB, l Library) {
	t.Helper()
	if err := buildable[l](); errors.Is(err, ErrMissing) && os.Getenv("XSPIN_NO_SKIP") != "1" {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
}

// start starts a pair in a lab of its own, and sees to it that nothing of it is left.
func start(t *testing.T) (*Pair, *netns.Lab) {
	t.Helper()
	return startOf(t, MPICH)
}

// startOf is start with a library.
func startOf(t *testing.T, l Library) (*Pair, *netns.Lab) {
	t.Helper()
	need(t, l)
	lab := netnstest.Temp(t, netns.LabConfig{})
	p, err := Start(t.Context(), PairConfig{lab, -1, -1, l})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := p.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
		nothingLeft(t, lab)
		if _, err := os.Stat(p.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there: %v", p.dir, err)
		}
	})
	return p, lab
}

// nothingLeft fails if there are processes in a lab.
func nothingLeft(t *testing.T, lab *netns.Lab) {
	t.Helper()
	for _, ns := range []*netns.Namespace{lab.NIC.NS, lab.Host.NS} {
		if pids, err := ns.Pids(); err != nil || len(pids) > 0 {
			t.Errorf("processes %v in %s, error %v", pids, ns.Name(), err)
		}
	}
}

// One pair for all that it survives.
func TestPair(t *testing.T) {
	p, lab := start(t)
	t.Run("transfers", func(t *testing.T) { testTransfers(t, p) })
	t.Run("overlaps", func(t *testing.T) { testOverlaps(t, p) })
	t.Run("refuses", func(t *testing.T) { testRefuses(t, p) })
	t.Run("no XDP", func(t *testing.T) { testNoXDP(t, p, lab) })
	t.Run("path", func(t *testing.T) { testPath(t, p, lab) }) // which it does not
}

// The same of Open MPI, and what ends it.
func TestOpenMPI(t *testing.T) {
	p, lab := startOf(t, OpenMPI)
	t.Run("transfers", func(t *testing.T) { testTransfers(t, p) })
	t.Run("overlaps", func(t *testing.T) { testOverlaps(t, p) })
	t.Run("refuses", func(t *testing.T) { testRefuses(t, p) })
	t.Run("cancel", func(t *testing.T) {
		if err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(100000)[int]"), 1, 2}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := <-busy(ctx, p); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		nothingLeft(t, lab)
	})
}

func TestCloseOpenMPI(t *testing.T) {
	p, lab := startOf(t, OpenMPI)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	nothingLeft(t, lab)
	if _, err := Start(t.Context(), PairConfig{lab, -1, 4000, OpenMPI}); err == nil || !strings.Contains(err.Error(), "CPU 4000") {
		t.Errorf("error %v without such a CPU", err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := Start(t.Context(), PairConfig{lab, -1, -1, OpenMPI}); !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "apt-get install openmpi-bin libopenmpi-dev") {
		t.Errorf("error %v without mpicc", err)
	}
}

// What a rank says is the error, not what the launcher makes of it.
func TestAFailingRankOfOpenMPI(t *testing.T) {
	p, lab := startOf(t, OpenMPI)
	err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(3000000000)[byte]"), 1, 1})
	if !errors.Is(err, ErrRank) || !strings.Contains(err.Error(), "MPI-3") || strings.Contains(err.Error(), "mpirun") {
		t.Errorf("error %v of a count that is no int", err)
	}
	nothingLeft(t, lab)
}

// A launcher that is killed takes its ranks with it.
func TestAKilledLauncher(t *testing.T) {
	p, lab := startOf(t, OpenMPI)
	if err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(100000)[int]"), 1, 2}); err != nil {
		t.Fatal(err)
	}
	result := busy(t.Context(), p)
	pids, err := lab.NIC.NS.Pids()
	if err != nil || len(pids) != 1 {
		t.Fatalf("receivers %v, error %v", pids, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pids[0]))
	if err != nil {
		t.Fatal(err)
	}
	var launcher int
	_, parent, _ := strings.Cut(string(status), "\nPPid:")
	if _, err := fmt.Sscan(parent, &launcher); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(launcher, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-result; !errors.Is(err, ErrRank) || !strings.Contains(err.Error(), "mpirun: signal: killed") {
		t.Errorf("error %v", err)
	}
	nothingLeft(t, lab)
}

// A launcher that hangs, and does not want to end, is killed.
func TestALauncherThatHangs(t *testing.T) {
	need(t, OpenMPI)
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "mpirun.openmpi"), []byte("#!/bin/sh\nkill -STOP $$\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	defer func(d time.Duration) { patience = d }(patience)
	patience = 100 * time.Millisecond
	lab := netnstest.Temp(t, netns.LabConfig{})
	if _, err := Start(t.Context(), PairConfig{lab, -1, -1, OpenMPI}); !errors.Is(err, ErrRank) || !strings.Contains(err.Error(), "not connected to each other after 100ms") {
		t.Errorf("error %v", err)
	}
	nothingLeft(t, lab)
}

func testTransfers(t *testing.T, p *Pair) {
	for _, x := range []struct {
		text     string
		count    int64
		messages int
	}{
		{"ctg(1000)[float]", 20, 16},
		{"hvec(2 1 18432)[hvec(2 1 12288)[hvec(2 1 6144)[vec(32 6 8)[ctg(18)[float]]]]]", 2, 3},
		{"hvec(100 1 -24)[ctg(4)[int]]", 3, 1}, // before its origin
		{"resized(0,8)[hidx(4000,1 0,1)[int]]", 30, 2},
		{"resized(0,-16)[hidx(0,1 100,1)[double]]", 30, 2}, // elements backwards
		{"ctg(0)[int]", 1, 2},
		{"ctg(1)[byte]", 1, 1},
	} {
		typ := parse(t, x.text)
		if err := p.Prepare(t.Context(), Transfer{typ, x.count, x.messages}); err != nil {
			t.Fatalf("%s: %v", x.text, err)
		}
		if want := uint64(x.count) * uint64(typ.Size()) * uint64(x.messages); p.round != want {
			t.Errorf("%s: rounds of %d bytes, want %d", x.text, p.round, want)
		}
		r, err := p.Receive(t.Context(), 5)
		if err != nil {
			t.Fatalf("%s: %v", x.text, err)
		}
		if len(r.Times) != 5 || slices.Min(r.Times) <= 0 || r.Receiver <= 0 || r.Sender <= 0 {
			t.Errorf("%s: %+v", x.text, r)
		}
	}
}

func testOverlaps(t *testing.T, p *Pair) {
	if err := p.Prepare(t.Context(), Transfer{parse(t, "vec(1000 1 2)[double]"), 10, 4}); err != nil {
		t.Fatal(err)
	}
	ran := func(err error) {
		t.Helper()
		if errors.Is(err, ErrNoGo) && os.Getenv("XSPIN_NO_SKIP") != "1" {
			t.Skip(err)
		} else if err != nil {
			t.Fatal(err)
		}
	}
	times, err := p.Compute(t.Context(), Compute{100, 3}, 2)
	ran(err)
	if len(times) != 2 || slices.Min(times) <= 0 {
		t.Errorf("compute: %v", times)
	}
	sound := func(o Overlap) bool {
		return 0 < o.Detected && 0 <= o.Computed && o.Detected <= o.Total && o.Computed <= o.Total
	}
	for _, gemms := range []int{0, 5, 60} { // the transfer, either and the GEMMs end last
		all, err := p.Overlap(t.Context(), Compute{100, gemms}, 2)
		ran(err)
		for _, o := range all {
			if len(all) != 2 || o.GEMMs != gemms || !sound(o) || (gemms > 0) != (o.Computed > 0) {
				t.Errorf("overlap with %d GEMMs: %+v", gemms, o)
			}
		}
	}
	all, err := p.Detect(t.Context(), Compute{20, 1e9}, 3)
	ran(err)
	for _, o := range all {
		// The time after detection is that of reading the clock.
		if len(all) != 3 || o.GEMMs < 1 || !sound(o) || o.Ratio() <= 0 || o.Ratio() > 1 {
			t.Errorf("detect: %+v", o)
		}
	}
	all, err = p.Detect(t.Context(), Compute{1, 1}, 1)
	ran(err)
	if len(all) != 1 || all[0].GEMMs != 1 {
		t.Errorf("detect with 1 GEMM at most: %+v", all)
	}
}

// Whatever cannot be meant is refused, and the pair goes on.
func testRefuses(t *testing.T, p *Pair) {
	ctx, typ := t.Context(), parse(t, "int")
	_, receive := p.Receive(ctx, 0)
	_, compute := p.Compute(ctx, Compute{0, 1}, 1)
	_, overlap := p.Overlap(ctx, Compute{1, -1}, 1)
	_, detect := p.Detect(ctx, Compute{1, 1}, -1)
	for want, err := range map[string]error{
		"0 elements":              p.Prepare(ctx, Transfer{typ, 0, 1}),
		"2147483648 elements":     p.Prepare(ctx, Transfer{typ, 1 << 31, 1}),
		"0 messages":              p.Prepare(ctx, Transfer{typ, 1, 0}),
		"65537 messages":          p.Prepare(ctx, Transfer{typ, 1, 1<<16 + 1}),
		"0 rounds":                receive,
		"matrices of dimension 0": compute,
		"-1 GEMMs":                overlap,
		"-1 rounds":               detect,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one of %q", err, want)
		}
	}
	if err := p.Prepare(ctx, Transfer{typ, 1, 1}); err != nil {
		t.Error(err)
	}
}

// Bytes must pass through the lab.
func testPath(t *testing.T, p *Pair, lab *netns.Lab) {
	if err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(1000)[int]"), 1, 1}); err != nil {
		t.Fatal(err)
	}
	p.round *= 100 // more than does
	if _, err := p.Receive(t.Context(), 2); !errors.Is(err, ErrPath) {
		t.Errorf("error %v, want that messages took another way", err)
	}
	if _, err := p.Receive(t.Context(), 2); !errors.Is(err, ErrPath) {
		t.Errorf("error %v of a later call, want the same", err)
	}
	nothingLeft(t, lab)
}

func testNoXDP(t *testing.T, p *Pair, lab *netns.Lab) {
	if err := p.Prepare(t.Context(), Transfer{parse(t, "int"), 1, 1}); err != nil {
		t.Fatal(err)
	}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "Apache-2.0",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}}) // XDP_PASS
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	for _, port := range []netns.Port{lab.NIC, lab.Host} {
		var l link.Link
		if err := port.NS.Do(func() error {
			i, err := net.InterfaceByName(port.Device)
			if err == nil {
				l, err = link.AttachXDP(link.XDPOptions{Program: prog, Interface: i.Index})
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Receive(t.Context(), 1); !errors.Is(err, ErrXDP) || !strings.Contains(err.Error(), port.Device) {
			t.Errorf("%s: receive: error %v", port.Device, err)
		}
		if _, err := Start(t.Context(), PairConfig{lab, -1, -1, MPICH}); !errors.Is(err, ErrXDP) {
			t.Errorf("%s: start: error %v", port.Device, err)
		}
		l.Close()
	}
	if _, err := p.Receive(t.Context(), 1); err != nil {
		t.Error(err)
	}
}

// busy has a pair do rounds that nobody will wait for.
func busy(ctx context.Context, p *Pair) <-chan error {
	result := make(chan error, 1)
	go func() {
		_, err := p.Receive(ctx, 1e6)
		result <- err
	}()
	return result
}

func TestAKilledRank(t *testing.T) {
	for victim, what := range []string{"receiver", "sender"} {
		t.Run(what, func(t *testing.T) {
			p, lab := start(t)
			if err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(100000)[int]"), 1, 2}); err != nil {
				t.Fatal(err)
			}
			result := busy(t.Context(), p)
			time.Sleep(50 * time.Millisecond) // any moment will do
			p.ranks[victim].kill()
			if err := <-result; !errors.Is(err, ErrRank) {
				t.Errorf("error %v", err)
			}
			nothingLeft(t, lab)
			if _, err := p.Compute(t.Context(), Compute{1, 1}, 1); !errors.Is(err, ErrRank) {
				t.Errorf("error %v of a later call", err)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	p, lab := start(t)
	if err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(100000)[int]"), 1, 2}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := <-busy(ctx, p); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	nothingLeft(t, lab)
	before, _ := filepath.Glob(filepath.Join(os.TempDir(), fmt.Sprintf("xspin-mpich-%d-*", os.Getpid())))
	if _, err := Start(ctx, PairConfig{lab, -1, -1, MPICH}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("start: error %v", err)
	}
	after, _ := filepath.Glob(filepath.Join(os.TempDir(), fmt.Sprintf("xspin-mpich-%d-*", os.Getpid())))
	if len(after) != len(before) {
		t.Errorf("start leaves %q, there were %q", after, before)
	}
}

// All others end otherwise.
func TestClose(t *testing.T) {
	p, lab := start(t)
	u := startUnpacker(t)
	if err := errors.Join(p.Close(), u.Close()); err != nil {
		t.Error(err)
	}
	nothingLeft(t, lab)
	if err := p.Prepare(t.Context(), Transfer{parse(t, "int"), 1, 1}); !errors.Is(err, errClosed) {
		t.Errorf("error %v after Close", err)
	}
}

func TestBadTypeAndBadPlace(t *testing.T) {
	p, lab := start(t)
	err := p.Prepare(t.Context(), Transfer{parse(t, "ctg(3000000000)[byte]"), 1, 1})
	if !errors.Is(err, ErrRank) || !strings.Contains(err.Error(), "MPI-3") {
		t.Errorf("error %v of a count that is no int", err)
	}
	nothingLeft(t, lab)
	if _, err := Start(t.Context(), PairConfig{lab, -1, 4000, MPICH}); err == nil || !strings.Contains(err.Error(), "CPU 4000") {
		t.Errorf("error %v without such a CPU", err)
	}
	nothingLeft(t, lab)
	t.Setenv("PATH", t.TempDir())
	if _, err := Start(t.Context(), PairConfig{lab, -1, -1, MPICH}); !errors.Is(err, ErrMissing) {
		t.Errorf("error %v without mpicc", err)
	}
	if _, err := StartUnpacker(t.Context(), -1); !errors.Is(err, ErrMissing) {
		t.Errorf("unpacker: error %v without mpicc", err)
	}
}

// TestRanksEndWithTheirStarter kills a process with a pair that is busy: this test, run
// once more.
func TestRanksEndWithTheirStarter(t *testing.T) {
	if names, library, ok := strings.Cut(os.Getenv("XSPIN_TEST_PAIR"), "/"); ok {
		nic, host, _ := strings.Cut(names, " ")
		lab, err := netns.Open(netns.LabConfig{NIC: netns.End{Namespace: nic}, Host: netns.End{Namespace: host}})
		if err != nil {
			t.Fatal(err)
		}
		p, err := Start(t.Context(), PairConfig{lab, -1, -1, Library(library)})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Prepare(t.Context(), Transfer{parse(t, "int"), 1, 1}); err != nil {
			t.Fatal(err)
		}
		result := busy(t.Context(), p)
		fmt.Println("ready")
		t.Fatal(<-result)
	}
	for _, l := range []Library{MPICH, OpenMPI} {
		t.Run(string(l), func(t *testing.T) { testRanksEndWithTheirStarter(t, l) })
	}
}

func testRanksEndWithTheirStarter(t *testing.T, l Library) {
	need(t, l)
	lab := netnstest.Temp(t, netns.LabConfig{})
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestRanksEndWithTheirStarter$")
	cmd.Env = append(os.Environ(), "XSPIN_TEST_PAIR="+lab.NIC.Namespace+" "+lab.Host.Namespace+"/"+string(l))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var word [5]byte
	_, err = out.Read(word[:])
	pids, _ := lab.NIC.NS.Pids()
	if string(word[:]) != "ready" || len(pids) == 0 {
		t.Errorf("it says %q, error %v; ranks %v", word, err, pids)
	}
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		pids, _ = lab.NIC.NS.Pids()
		if launcher, _ := lab.Host.NS.Pids(); len(pids)+len(launcher) == 0 {
			break
		}
	}
	nothingLeft(t, lab)
}
