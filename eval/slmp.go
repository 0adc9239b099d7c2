// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/flags"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/nic"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
)

// slmpParts are what --only chooses from, in the order in which they are measured.
var slmpParts = []struct {
	name    string
	measure func(*slmpBench, context.Context) error
}{
	{"file", (*slmpBench).fileRows},
	{"noop", (*slmpBench).noopRows},
	{"small", (*slmpBench).smallRows},
	{"policy", (*slmpBench).policyRows},
	{"state", (*slmpBench).stateRows},
	{"fairness", (*slmpBench).fairnessRows},
	{"loss", (*slmpBench).lossRows},
	{"window", (*slmpBench).windowRows},
	{"auto", (*slmpBench).autoRows},
}

// slmpOptions are what can be chosen of `xspin bench slmp`.
type slmpOptions struct {
	only        []string // parts; none: all
	size        int64    // bytes of the file
	rates       []uint64 // bit/s of the paths on which windows compete, 0 for unlimited
	delays      []time.Duration
	losses      []float64
	candidates  []int // the windows that auto competes with, and that are swept
	parallels   []int // messages at a time in the sweep
	outstanding []int // small messages at a time
}

func slmpDefaults() slmpOptions {
	return slmpOptions{
		size:        1 << 30,
		rates:       []uint64{10e6, 100e6, 1e9, 0},
		delays:      []time.Duration{0, 2 * time.Millisecond, 20 * time.Millisecond},
		losses:      []float64{0, 0.01},
		candidates:  []int{1, 4, 16, 64, 256, 1024, 4096},
		parallels:   []int{1, 8, 64},
		outstanding: []int{64, 256, 1024},
	}
}

// slmpFlags adds the flags of `xspin bench slmp`.
func slmpFlags(fl *pflag.FlagSet) func() (measureFunc, error) {
	o := slmpDefaults()
	var names []string
	for _, p := range slmpParts {
		names = append(names, p.name)
	}
	size, rates, delays, losses := "1GiB", []string{"10mbit", "100mbit", "1gbit", "0"}, []string{"0ms", "2ms", "20ms"}, []string{"0%", "1%"}
	fl.StringSliceVar(&o.only, "only", nil, "parts to measure: "+strings.Join(names, ", ")+" (default all)")
	flags.ListOf(fl, "only", names)
	fl.StringVar(&size, "size", size, "of the file: 1MiB to 4GiB")
	fl.StringSliceVar(&rates, "rates", rates, "of part auto: of the path, 0 for unlimited")
	fl.StringSliceVar(&delays, "delays", delays, "of part auto: one way")
	fl.StringSliceVar(&losses, "losses", losses, "of part auto: of frames, each way")
	return func() (_ measureFunc, err error) {
		for _, name := range o.only {
			if !slices.Contains(names, name) {
				return nil, flags.Error("only", name, "want "+strings.Join(names, ", "))
			}
		}
		if o.size, err = flags.Bytes("size", size, 1<<20, slmp.MaxMessage); err != nil {
			return nil, err
		}
		o.rates, o.delays, o.losses = nil, nil, nil
		for _, s := range rates {
			r, err := impair.ParseRate(s)
			if err != nil {
				return nil, flags.Error("rates", s, err.Error())
			}
			o.rates = append(o.rates, r)
		}
		for _, s := range delays {
			d, err := time.ParseDuration(s)
			if err != nil || d < 0 || d > impair.MaxDelay {
				return nil, flags.Error("delays", s, fmt.Sprintf("want times as in 2ms, 0s to %v", impair.MaxDelay))
			}
			o.delays = append(o.delays, d)
		}
		for _, s := range losses {
			p, err := impair.ParseFraction(s)
			if err != nil {
				return nil, flags.Error("losses", s, err.Error())
			}
			o.losses = append(o.losses, p)
		}
		return o.measure, nil
	}
}

// measure is `xspin bench slmp`.
func (o slmpOptions) measure(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) (err error) {
	b, err := newSLMPBench(lab, cfg, o, doc)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for _, p := range slmpParts {
		if len(o.only) > 0 && !slices.Contains(o.only, p.name) {
			continue
		}
		if err := p.measure(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

func newSLMPBench(lab *benchLab, cfg benchConfig, o slmpOptions, doc *bench.Document) (b *slmpBench, err error) {
	b = &slmpBench{benchLab: lab, cfg: cfg, o: o, doc: doc, files: map[int64]string{}}
	if b.self, err = os.Executable(); err != nil {
		return nil, err
	}
	if b.dir, err = testbed.TempDir(benchMemory, "bench"); err != nil {
		return nil, fmt.Errorf("files in memory are needed: %w", err)
	}
	if _, err := exec.LookPath("iperf3"); err == nil {
		b.tcp = true
	} else {
		cfg.warn(fmt.Sprintf("TCP is not measured: iperf3 is needed (apt-get install iperf3): %v", err))
	}
	return b, nil
}

// close removes the files.
func (b *slmpBench) close() error { return os.RemoveAll(b.dir) }

// benchMemory is where files in memory are.
const benchMemory = "/dev/shm"

// slmpBench is one run of `xspin bench slmp`.
type slmpBench struct {
	*benchLab
	cfg   benchConfig
	o     slmpOptions
	doc   *bench.Document
	self  string           // our executable
	hook  nic.Hook         // of oneHPU
	tcp   bool             // iperf3 is there
	dir   string           // in memory
	files map[int64]string // by size
	bytes []byte           // random, as many as the longest file has
	// allocs are what this process allocated while the last sender ran.
	allocs float64
}

// few is how often the many cells of a grid are measured.
func (b *slmpBench) few() int { return min(b.cfg.runs, 3) }

// short is how long a run with generated traffic takes.
func (b *slmpBench) short() time.Duration { return b.cfg.duration / 4 }

// file returns the path of a file of so many random bytes, the beginning of
// b.bytes.
func (b *slmpBench) file(n int64) (string, error) {
	if path, ok := b.files[n]; ok {
		return path, nil
	}
	if int64(len(b.bytes)) < n {
		b.bytes = make([]byte, n)
		seed := [32]byte{1}
		_, _ = rand.NewChaCha8(seed).Read(b.bytes) // never fails
	}
	path := filepath.Join(b.dir, strconv.FormatInt(n, 10))
	b.files[n] = path
	return path, os.WriteFile(path, b.bytes[:n], 0o644)
}

// to is where messages go.
func (b *slmpBench) to() string {
	return netip.AddrPortFrom(b.NIC.Addr.Addr(), slmp.Port).String()
}

// A sendReport is what is wanted of what `xspin send --json` prints.
type sendReport struct {
	Offload       string  `json:"offload"`
	Bytes         uint64  `json:"bytes"`
	Seconds       float64 `json:"seconds"`
	Gbps          float64 `json:"gbps"`
	Segments      uint64  `json:"segments"`
	Retransmitted uint64  `json:"retransmitted"`
	RTT           rttUS   `json:"rtt_us"`
}

type rttUS struct {
	Smoothed float64 `json:"smoothed"`
	Min      float64 `json:"min"`
}

// send runs `xspin send` with a file, on the sender's CPU. With a limit the
// transfer may be cut there: then the report tells how far it came.
func (b *slmpBench) send(ctx context.Context, file string, limit time.Duration, args ...string) (r sendReport, err error) {
	args = append([]string{"send", "--json", "--to", b.to()}, args...)
	if limit > 0 {
		args = append(args, "--timeout", limit.String())
	}
	cmd := exec.CommandContext(ctx, b.self, append(args, file)...)
	var out, msg bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	if err := testbed.Start(b.Host.NS, b.sender, cmd); err != nil {
		return r, err
	}
	mallocs := countMallocs()
	ended := cmd.Wait()
	b.allocs = mallocs()
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return r, fmt.Errorf("xspin %s: %w: %s", strings.Join(args, " "), errors.Join(ended, err), strings.TrimSpace(msg.String()))
	}
	if ended != nil && (limit == 0 || !strings.Contains(msg.String(), "--timeout")) {
		return r, fmt.Errorf("xspin %s: %w: %s", strings.Join(args, " "), ended, strings.TrimSpace(msg.String()))
	}
	return r, nil
}

// sendRuns are the figures of transfers, run by run.
type sendRuns struct {
	gbps, again, rtt, unverified, allocs []float64
	on                                   string
}

func (s *sendRuns) add(r sendReport) {
	s.gbps = append(s.gbps, r.Gbps)
	s.again = append(s.again, 100*float64(r.Retransmitted)/float64(max(r.Segments, 1)))
	s.rtt = append(s.rtt, r.RTT.Smoothed)
}

func (s *sendRuns) side(what string) bench.Side {
	d := bench.NewSide(what, "Gbit/s", s.gbps)
	d.On = s.on
	d.Add("sent_again_percent", s.again)
	d.Add("rtt_us", s.rtt)
	d.Add("unverified_percent", s.unverified)
	d.Add("receiver_allocs_per_packet", s.allocs)
	return d
}

// oneHPU is the NIC of most rows.
func (b *slmpBench) oneHPU() nic.Config {
	cfg := nic.Config{Hook: b.hook, HPUs: 1, Workers: 1}
	if b.receiver >= 0 {
		cfg.CPUs = []int{b.receiver}
	}
	return cfg
}

// depositSpec is a context that puts messages into memory, all at its start.
func depositSpec(memory []byte) nic.ContextSpec {
	return nic.ContextSpec{Name: "bench", Rulesets: []matcher.Ruleset{matcher.SLMP()}, Window: hpu.Memory(memory)}
}

// memory returns memory that is not the garbage collector's and is there: its pages
// are made before a message comes, as those of a window are.
func memory(n int64) ([]byte, func() error, error) {
	m, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, nil, fmt.Errorf("%d bytes of memory for messages: %w", n, err)
	}
	return m, func() error { return unix.Munmap(m) }, nil
}

// granted says what is on, with a NIC open.
func (b *slmpBench) granted(n *nic.NIC) (string, error) {
	state, err := b.state()
	return state + "; AF_XDP " + noop{n}.on(), err
}

// slmpFrame is a frame of so many bytes with room for an SLMP header, and a UDP
// checksum of 0, which is none.
func (b *slmpBench) slmpFrame(size int) []byte {
	f := b.udpFrame(size)
	packet.UDP(packet.IPv4(packet.Ethernet(f).Payload()).Payload()).SetDstPort(slmp.Port)
	return f
}

// slmpHeaders are the bytes of a frame before the payload of a segment.
const slmpHeaders = 14 + 20 + 8 + slmp.HeaderLen

// fed is what became of generated frames.
type fed struct {
	sent int
	done uint64 // handled while they were generated
	took time.Duration
}

const (
	// ahead is how many generated frames may be on their way: none is lost for
	// lack of room, and the receiver never waits.
	ahead = 1536
	burst = 512
	// stall is after which frames of which nothing is heard are given up.
	stall = 300 * time.Millisecond
)

// feed generates frames for a time, as fast as the receiver takes them, which done
// counts: messages need every segment. It looks every nap, or spins.
func (b *slmpBench) feed(g *yardstick.Generator, frame []byte, d, nap time.Duration, room, burst int, done func() (uint64, error)) (f fed, err error) {
	base, err := done()
	if err != nil {
		return f, err
	}
	err = b.Host.NS.Do(func() error {
		return testbed.OnCPU(b.sender, func() error {
			begin, waited := time.Now(), waitedForCPU()
			last, moved, lost := base, begin, 0
			var failed error
			_, err := g.Feed(frame, func(sent int) int {
				f.sent = sent
				for {
					now := time.Now()
					n, err := done()
					f.done, f.took = n-base, now.Sub(begin)
					// One at least, however busy the machine is.
					if err != nil || f.took >= d && (f.done > 0 || f.took >= d+stall) {
						failed = err
						return 0
					}
					if n != last {
						last, moved = n, now
					} else if now.Sub(moved) > stall {
						lost, moved = sent-int(n-base), now
					}
					if sent-lost-int(n-base)+burst <= room {
						return burst
					}
					if nap > 0 {
						time.Sleep(nap)
					} else {
						unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
					}
				}
			})
			b.waits.add(waitedForCPU()-waited, f.took)
			return errors.Join(err, failed)
		})
	})
	return f, err
}

// segmentGenerator returns a generator of SLMP segments out of the host's end.
func (b *slmpBench) segmentGenerator() (g *yardstick.Generator, err error) {
	out, err := iface(b.Host)
	if err != nil {
		return nil, err
	}
	err = b.Host.NS.Do(func() error {
		g, err = yardstick.NewSegmentGenerator(out)
		return err
	})
	return g, err
}

// handled counts segments whose handler, or default deposit, has run.
func handled(c *nic.Context) func() (uint64, error) {
	return func() (uint64, error) { return c.Stats().Handled, nil }
}
