// SPDX-License-Identifier: Apache-2.0

// Package hostqbench measures hostq between two processes, next to what it is
// compared with. The other process is the program itself with a hidden command, which its
// main hands to [Main].
package hostqbench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/hostq"
	"github.com/xspin/xspin/internal/quantile"
)

// Command is the hidden command of the binary that the other process runs. Its argument
// says what it is to do.
const Command = "_hostqbench"

// A job is what the other process is to do.
type job struct {
	Do     string
	CPU    int
	Sleep  bool
	N      int
	Layout hostq.Layout
}

// Place says where the two run. A CPU below 0 is any.
type Place struct {
	NIC, Host int // CPUs
}

// Main runs the hidden command, if args, as in os.Args[1:], are it.
func Main(args []string) (ok bool, err error) {
	if len(args) != 2 || args[0] != Command {
		return false, nil
	}
	return true, serve(args[1])
}

func serve(s string) error {
	var j job
	if err := json.Unmarshal([]byte(s), &j); err != nil {
		return err
	}
	if err := pin(j.CPU); err != nil {
		return err
	}
	go func() { // the other one has gone
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	switch j.Do {
	case "host", "sink":
		var lanes []int
		for i := range j.Layout.Lanes {
			lanes = append(lanes, 5+i)
		}
		h, err := hostq.OpenHost(j.Layout, 3, 4, lanes)
		if err != nil {
			return err
		}
		ready()
		if j.Do == "sink" {
			return sink(h, j)
		}
		return answer(h, j)
	case "eventfd":
		ready()
		return echo(3, 4)
	case "ring":
		r, err := openRing(3)
		if err != nil {
			return err
		}
		ready()
		r.take(j.N)
		ready()
	}
	return nil
}

func ready() { fmt.Println("ready") }

// answer answers requests with their own payload.
func answer(h *hostq.Host, j job) error {
	ctx := context.Background()
	var c hostq.Call
	for spins := 0; ; {
		if !h.Request(&c) {
			if j.Sleep {
				if err := h.Wait(ctx, 0); err != nil {
					return gone(err)
				}
			} else if spins++; spins%1024 == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
			continue
		}
		if err := h.Respond(&c, 0, c.Payload); err != nil {
			return gone(err)
		}
	}
}

// sink takes requests, and looks at them.
func sink(h *hostq.Host, j job) error {
	var c hostq.Call
	for i, spins := 0, 0; i < j.N; {
		if !h.Request(&c) {
			if spins++; spins%1024 == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
			continue
		}
		if c.Tag != uint64(i) {
			return fmt.Errorf("request %d has tag %d", i, c.Tag)
		}
		h.Done(&c)
		i++
	}
	ready()
	return gone(h.Wait(context.Background(), 0))
}

func gone(err error) error {
	if errors.Is(err, hostq.ErrDetached) {
		return nil
	}
	return err
}

func echo(r, w int) error {
	var b [8]byte
	for {
		if _, err := unix.Read(r, b[:]); err != nil {
			return err
		}
		if _, err := unix.Write(w, b[:]); err != nil {
			return err
		}
	}
}

// pin keeps the goroutine on a thread, and that on a CPU.
func pin(cpu int) error {
	runtime.LockOSThread()
	if cpu < 0 {
		return nil
	}
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("pinning to CPU %d: %w", cpu, err)
	}
	return nil
}

// onCPU calls f on a thread of its own, on a CPU. The thread ends with it.
func onCPU(cpu int, f func() error) error {
	errs := make(chan error, 1)
	go func() {
		if err := pin(cpu); err != nil {
			errs <- err
			return
		}
		errs <- f()
	}()
	return <-errs
}

// A peer is the other process.
type peer struct {
	cmd   *exec.Cmd
	stdin io.Closer
	out   *bufio.Reader
}

func start(ctx context.Context, j job, fds ...int) (*peer, error) {
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Command, string(text))
	cmd.Stderr = os.Stderr
	for _, fd := range fds {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, os.NewSyscallError("fcntl", err)
		}
		f := os.NewFile(uintptr(dup), "")
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the other process: %w", err)
	}
	p := &peer{cmd, stdin, bufio.NewReader(out)}
	if err := p.wait(); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

// wait waits for the process to say so.
func (p *peer) wait() error {
	if s, err := p.out.ReadString('\n'); err != nil || s != "ready\n" {
		return fmt.Errorf("the other process said %q: %w", s, errors.Join(err, p.cmd.Wait()))
	}
	return nil
}

func (p *peer) stop() {
	_ = p.stdin.Close()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// pair makes a pair and a process that has the other side.
func pair(ctx context.Context, cfg hostq.PairConfig, j job) (*hostq.Pair, func(), error) {
	p, err := hostq.NewPair(cfg)
	if err != nil {
		return nil, nil, err
	}
	m, b, lanes := p.Descriptors()
	j.Layout = p.Layout()
	o, err := start(ctx, j, append([]int{m, b}, lanes...)...)
	if err != nil {
		_ = p.Close()
		return nil, nil, err
	}
	return p, func() {
		p.Detach()
		o.stop()
		_ = p.Close()
	}, nil
}

// Waits says who sleeps in RoundTrip. Who does not, spins.
type Waits struct{ NIC, Host bool }

// RoundTrip has the NIC's side ask n times, with a payload of so many bytes, and the
// host answer with the same, and returns how long one round trip took.
func RoundTrip(ctx context.Context, at Place, sleep Waits, payload, n int) (time.Duration, error) {
	p, stop, err := pair(ctx, hostq.PairConfig{Name: "bench", Layout: hostq.Layout{Lanes: 1}}, job{Do: "host", CPU: at.Host, Sleep: sleep.Host})
	if err != nil {
		return 0, err
	}
	defer stop()
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return 0, os.NewSyscallError("epoll_create1", err)
	}
	defer unix.Close(ep)
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, p.Doorbell(0), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff}); err != nil {
		return 0, os.NewSyscallError("epoll_ctl", err)
	}
	var took time.Duration
	err = onCPU(at.NIC, func() error {
		r := hostq.Request{Reply: true, Payload: make([]byte, payload)}
		var bad error
		f := func(r *hostq.Response) {
			if r.Err != nil || len(r.Payload) != payload {
				bad = fmt.Errorf("answer of %d bytes for %d: %w", len(r.Payload), payload, r.Err)
			}
		}
		var events [1]unix.EpollEvent
		ask := func() error {
			if _, err := p.Request(0, &r, nil); err != nil {
				return err
			}
			for spins := 0; p.Poll(0, 1, f) == 0; {
				if sleep.NIC {
					if p.Arm(0) {
						_, _ = unix.EpollWait(ep, events[:], -1)
						p.Disarm(0)
					}
				} else if spins++; spins%1024 == 0 {
					unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
				}
			}
			return bad
		}
		return timed(ctx, &took, n, ask)
	})
	return took, err
}

// timed calls f n times, and a tenth of that before, and says how long one took: the
// median of blocks. What disturbs a shared machine disturbs few of them.
func timed(ctx context.Context, took *time.Duration, n int, f func() error) error {
	const block = 32
	for range n / 10 {
		if err := f(); err != nil {
			return err
		}
	}
	blocks := make([]float64, 0, n/block+1)
	for done := 0; done < n; done += block {
		if err := ctx.Err(); err != nil {
			return err
		}
		begin := time.Now()
		for range block {
			if err := f(); err != nil {
				return err
			}
		}
		blocks = append(blocks, float64(time.Since(begin))/block)
	}
	*took = time.Duration(quantile.Median(blocks))
	return nil
}

// PingPong has two threads of this process pass a number to and fro n times, and returns
// how long that took to and fro. With one word both write the same, and each finds the
// cache line where it has to write next; with two, one for each direction, as all
// queues have them, a line must be fetched before it is written: twice the traffic.
func PingPong(ctx context.Context, at Place, words, n int) (time.Duration, error) {
	var w [2]struct {
		atomic.Uint64
		_ [128]byte
	}
	there, back := &w[0].Uint64, &w[words-1].Uint64
	const stop = ^uint64(0)
	// On one CPU it is the yielding that takes the time.
	until := func(w *atomic.Uint64, v uint64) bool {
		for spins := 1; ; spins++ {
			if got := w.Load(); got == v || got == stop {
				return got == v
			}
			if spins%1024 == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = onCPU(at.Host, func() error {
			for v := uint64(1); until(there, v); v += 2 {
				back.Store(v + 1)
			}
			return nil
		})
	})
	var took time.Duration
	err := onCPU(at.NIC, func() error {
		v := uint64(0)
		return timed(ctx, &took, n, func() error {
			there.Store(v + 1)
			until(back, v+2)
			v += 2
			return nil
		})
	})
	there.Store(stop)
	wg.Wait()
	return took, err
}

// Eventfd has two processes wake each other by eventfds n times, and returns how long
// it took to and fro.
func Eventfd(ctx context.Context, at Place, n int) (time.Duration, error) {
	var fds [2]int
	for i := range fds {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return 0, os.NewSyscallError("eventfd", err)
		}
		defer unix.Close(fd)
		fds[i] = fd
	}
	o, err := start(ctx, job{Do: "eventfd", CPU: at.Host}, fds[0], fds[1])
	if err != nil {
		return 0, err
	}
	defer o.stop()
	var took time.Duration
	err = onCPU(at.NIC, func() error {
		b := [8]byte{1}
		return timed(ctx, &took, n, func() error {
			if _, err := unix.Write(fds[0], b[:]); err != nil {
				return err
			}
			_, err := unix.Read(fds[1], b[:])
			return err
		})
	})
	return took, err
}

// Batch is how many notifications go one after the other in Notify and Ring.
const Batch = 64

// Notify sends n requests that want no answer, in batches, with a payload of so many
// bytes, and returns how many there were per second.
func Notify(ctx context.Context, at Place, payload, n int) (float64, error) {
	n -= n % Batch
	p, stop, err := pair(ctx, hostq.PairConfig{Name: "bench", Layout: hostq.Layout{Lanes: 1, Payload: max(payload, 1)}},
		job{Do: "sink", CPU: at.Host, N: n})
	if err != nil {
		return 0, err
	}
	defer stop()
	// stop's process tells when it has them all.
	var took time.Duration
	err = onCPU(at.NIC, func() error {
		var rs [Batch]hostq.Request
		buf := make([]byte, payload)
		begin := time.Now()
		for i := 0; i < n; {
			for j := range rs {
				rs[j].Tag, rs[j].Payload = uint64(i+j), buf
			}
			for left, spins := rs[:], 0; len(left) > 0; spins++ {
				k, err := p.Notify(left)
				i += k
				left = left[k:]
				if err != nil && err != hostq.ErrFull {
					return err
				}
				if spins%64 == 63 {
					if err := ctx.Err(); err != nil {
						return err
					}
					unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
				}
			}
		}
		for p.Stats().Waiting > 0 {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		took = time.Since(begin)
		return nil
	})
	return float64(n) / took.Seconds(), err
}

// Ring is Notify over the barest ring that there is: one producer, one consumer, slots
// of as many bytes as a notification of so much payload has, published in batches.
func Ring(ctx context.Context, at Place, payload, n int) (float64, error) {
	n -= n % Batch
	mem, err := hostq.NewMemory("bench", ringSize)
	if err != nil {
		return 0, err
	}
	defer mem.Close()
	r := bareRing{mem.Bytes()}
	*r.record() = uint64((recordHeader + payload + 63) &^ 63)
	o, err := start(ctx, job{Do: "ring", CPU: at.Host, N: n}, mem.FD())
	if err != nil {
		return 0, err
	}
	defer o.stop()
	var took time.Duration
	err = onCPU(at.NIC, func() error {
		begin := time.Now()
		r.put(n, make([]byte, payload))
		took = time.Since(begin)
		return nil
	})
	return float64(n) / took.Seconds(), err
}

const (
	ringSlots    = 1024
	recordHeader = 48
	ringSize     = 4 << 20
	recordsAt    = 4096
)

// A bareRing has its record's size at 0, the tail at 128, the head at 256.
type bareRing struct{ b []byte }

func openRing(fd int) (bareRing, error) {
	m, err := hostq.OpenMemory(fd, ringSize)
	if err != nil {
		return bareRing{}, err
	}
	return bareRing{m.Bytes()}, nil
}

func (r bareRing) word(off int) *uint64 { return (*uint64)(unsafe.Pointer(&r.b[off])) }
func (r bareRing) record() *uint64      { return r.word(0) }

func (r bareRing) put(n int, payload []byte) {
	size := int(*r.record())
	head := uint64(0)
	tail := r.word(128)
	for i := uint64(0); i < uint64(n); i++ {
		for spins := 1; i-head >= ringSlots; spins++ {
			head = atomic.LoadUint64(r.word(256))
			if spins%64 == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
		}
		s := r.b[recordsAt+int(i%ringSlots)*size:][:size]
		h := (*[recordHeader / 8]uint64)(unsafe.Pointer(&s[0]))
		*h = [recordHeader / 8]uint64{i, i, i, i, i, i}
		copy(s[recordHeader:], payload)
		if i%Batch == Batch-1 {
			atomic.StoreUint64(tail, i+1)
		}
	}
	for atomic.LoadUint64(r.word(256)) != uint64(n) {
		unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}

func (r bareRing) take(n int) {
	size := int(*r.record())
	tail := uint64(0)
	var h [recordHeader / 8]uint64
	for i := uint64(0); i < uint64(n); i++ {
		for spins := 1; i == tail; spins++ {
			if tail = atomic.LoadUint64(r.word(128)); spins%1024 == 0 {
				unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
		}
		s := r.b[recordsAt+int(i%ringSlots)*size:][:size]
		if h = *(*[recordHeader / 8]uint64)(unsafe.Pointer(&s[0])); h[0] != i {
			panic(fmt.Sprintf("record %d has %d", i, h[0]))
		}
		if i+1 == tail || i%Batch == Batch-1 {
			atomic.StoreUint64(r.word(256), i+1)
		}
	}
}
