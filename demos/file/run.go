// SPDX-License-Identifier: Apache-2.0

// Package file is the second demo: files that arrive as SLMP messages and are put
// in place by handlers on XsPIN's HPUs, compared with TCP over the same lab.
package file

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/testbed"
	"github.com/xspin/xspin/slmp"
)

// Mode is how the bytes travel.
type Mode string

// Modes.
const (
	SLMP      Mode = "slmp"            // aggregated acknowledgements
	Plain     Mode = "slmp_plain"      // one acknowledgement for each segment, as in FPsPIN
	Window    Mode = "slmp_window"     // as SLMP, into the window of an application
	XDP       Mode = "slmp_xdp"        // as Window, by handlers in eBPF at xdp
	TC        Mode = "slmp_tc"         // as Window, by handlers in eBPF at tc
	TCPFrames Mode = "tcp_same_frames" // with the NIC attached: no segmentation offload, so one frame for each segment
	TCP       Mode = "tcp"             // as usual, no XDP program on either end
)

// modes are all modes, in the order of the report.
var modes = []Mode{SLMP, Plain, Window, XDP, TC, TCPFrames, TCP}

var (
	// ErrConfig is returned, wrapped, for an invalid Config.
	ErrConfig = errors.New("invalid file transfer")
	// ErrContents is returned, wrapped, if a received file differs from what was sent.
	ErrContents = errors.New("a received file differs from what was sent")
)

// Config says what to measure. There are no defaults: the command has them.
type Config struct {
	Size     int64 // of the file, bytes
	Runs     int   // of each mode
	Parallel int   // how many times the file is sent at once; TCP: streams that share as many bytes
	Into     []Into
	Window   string
	// Sender is the command line that sends, `xspin send` with its path.
	Sender    []string
	SenderCPU int // for Sender and iperf3's client; -1 for any
	// Server says how to receive. If Store.Dir is empty, files go to a temporary
	// directory in memory. Run sets Store.Ended, Store.Prepare, Into and Places.
	Server ServerConfig
	Keep   bool // leave the files of the last run, in Store.Dir
}

func (c Config) check() error {
	switch {
	case c.Size < 0 || c.Size > slmp.MaxMessage:
		return fmt.Errorf("%w: %d bytes: want 0 to %d", ErrConfig, c.Size, int64(slmp.MaxMessage))
	case c.Runs < 1 || c.Parallel < 1:
		return fmt.Errorf("%w: %d runs, %d at once: want at least one", ErrConfig, c.Runs, c.Parallel)
	case c.Keep && c.Server.Store.Dir == "":
		return fmt.Errorf("%w: files in a temporary directory cannot be kept", ErrConfig)
	case len(c.Into) == 0:
		return fmt.Errorf("%w: nothing that receives", ErrConfig)
	case len(c.Sender) == 0:
		return fmt.Errorf("%w: no command that sends", ErrConfig)
	}
	return nil
}

// Run transfers in one mode after the other; progress, if not nil, is told before
// each. When ctx ends it returns the results it has, with ctx's error.
func Run(ctx context.Context, lab *netns.Lab, c Config, progress func(string)) (_ *Report, err error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if progress == nil {
		progress = func(string) {}
	}
	temp, err := testbed.TempDir(memory(), "file")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	if c.Server.Store.Dir == "" {
		c.Server.Store.Dir = temp
		// The application, which runs as another user, makes its files there too.
		if err := os.Chown(temp, rtt.Nobody, rtt.Nobody); err != nil {
			return nil, err
		}
	}
	source := filepath.Join(temp, ".source")
	sum, err := random(source, c.Size)
	if err != nil {
		return nil, err
	}
	r := newReport(lab, c, sum)

	t := &transfers{lab: lab, c: c, source: source, sum: sum, report: r, ended: make(chan Received, 4096)}
	for i, into := range c.Into {
		t.keep = c.Keep && i == len(c.Into)-1
		if err := t.slmp(ctx, into, progress); err != nil {
			return r, err
		}
	}
	return r, t.tcp(ctx, TCP, progress)
}

// memory returns a directory of files in memory, or else the one for temporary files.
func memory() string {
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		return "/dev/shm"
	}
	return os.TempDir()
}

// random makes a file that does not compress.
func random(name string, size int64) (sum string, err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	seed := sha256.Sum256([]byte(time.Now().String()))
	_, err = io.CopyN(io.MultiWriter(f, h), rand.NewChaCha8(seed), size)
	return hex.EncodeToString(h.Sum(nil)), errors.Join(err, f.Close())
}

// transfers is one run of the demo.
type transfers struct {
	lab    *netns.Lab
	c      Config
	source string
	sum    string
	report *Report
	ended  chan Received
	keep   bool // keep the files of the last run
}

// slmp measures what needs the NIC.
func (t *transfers) slmp(ctx context.Context, into Into, progress func(string)) (err error) {
	c := t.c.Server
	c.Into, c.Places = into, t.c.Parallel
	c.Store.Prepare = t.c.Size + step // the whole of the next file
	c.Store.Ended = func(r Received) { t.ended <- r }
	s, err := start(ctx, t.lab, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	list := []Mode{SLMP, Plain}
	switch into {
	case IntoWindow:
		list = []Mode{Window}
	case IntoXDP:
		list = []Mode{XDP}
	case IntoTC:
		list = []Mode{TC}
	}
	for run := range t.c.Runs {
		for i, m := range list {
			progress(fmt.Sprintf("run %d of %d: %s", run+1, t.c.Runs, m.describe()))
			if err := t.send(ctx, s, m, t.keep && run == t.c.Runs-1 && i == len(list)-1); err != nil {
				return fmt.Errorf("%s: %w", m.describe(), err)
			}
		}
	}
	// For answers from XDP there is a program on the sender's end, too: TCP is measured with
	// a receiver that needs none, if there is one. At tc nothing cuts its frames.
	if t.report.find(TCPFrames) != nil || into == IntoTC || into == IntoXDP && len(t.c.Into) > 1 {
		return nil
	}
	return t.tcp(ctx, TCPFrames, progress)
}

// send transfers the file once by SLMP, and compares.
func (t *transfers) send(ctx context.Context, s server, m Mode, keep bool) error {
	links, err := rtt.ReadLinks(t.lab)
	if err != nil {
		return err
	}
	before, err := s.unverified()
	if err != nil {
		return err
	}
	n := strconv.Itoa(t.c.Parallel)
	args := append(t.c.Sender[1:len(t.c.Sender):len(t.c.Sender)], "--json", "--window", t.c.Window, "--parallel", n, "--repeat", n,
		"--to", netip.AddrPortFrom(t.lab.NIC.Addr.Addr(), slmp.Port).String())
	if m == Plain {
		args = append(args, "--plain")
	}
	cmd := exec.CommandContext(ctx, t.c.Sender[0], append(args, t.source)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := testbed.Start(t.lab.Host.NS, t.c.SenderCPU, cmd); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		err = fmt.Errorf("sender: %w: %s", err, strings.TrimSpace(errs.String()))
		for {
			select {
			case r := <-t.ended:
				if r.Err != nil {
					err = errors.Join(err, fmt.Errorf("receiver: message %d from %s: %w", r.Number, r.Source, r.Err))
				}
				continue
			default:
			}
			return err
		}
	}
	var sent struct {
		Seconds       float64 `json:"seconds"`
		Segments      uint64  `json:"segments"`
		Retransmitted uint64  `json:"retransmitted"`
		RTT           struct {
			Smoothed float64 `json:"smoothed"`
		} `json:"rtt_us"`
	}
	if err := json.Unmarshal(out.Bytes(), &sent); err != nil {
		return fmt.Errorf("result of %s: %w", strings.Join(t.c.Sender, " "), err)
	}
	if err := t.compare(ctx, keep); err != nil {
		return err
	}

	after, err := s.unverified()
	if err != nil {
		return err
	}
	res := t.report.result(m, links)
	bytes := float64(t.c.Size) * float64(t.c.Parallel)
	res.add(bytes*8/1e9/max(sent.Seconds, 1e-9), sent.Seconds)
	res.Segments += sent.Segments
	res.Retransmitted += sent.Retransmitted
	res.RTT = append(res.RTT, sent.RTT.Smoothed)
	res.Unverified += after - before
	return nil
}

// compare waits for the files of a transfer and compares them with the source.
func (t *transfers) compare(ctx context.Context, keep bool) error {
	// The NIC has acknowledged them; only their checksums are left to compute.
	limit := time.After(10*time.Second + time.Duration(t.c.Size*int64(t.c.Parallel))*100) // 10 MB/s
	for range t.c.Parallel {
		select {
		case r := <-t.ended:
			if r.Err != nil {
				return fmt.Errorf("receiver: message %d from %s: %w", r.Number, r.Source, r.Err)
			}
			if r.SHA256 != t.sum {
				return fmt.Errorf("%w: %s has %d bytes with SHA-256 %s, want %d with %s", ErrContents, r.Path, r.Bytes, r.SHA256, t.c.Size, t.sum)
			}
			if keep {
				t.report.Files = append(t.report.Files, r.Path)
			} else if err := os.Remove(r.Path); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-limit:
			return errors.New("the sender says that all is acknowledged, but not all files are there")
		}
	}
	return nil
}

// tcp measures iperf3, if it is installed.
func (t *transfers) tcp(ctx context.Context, m Mode, progress func(string)) error {
	if _, err := exec.LookPath("iperf3"); err != nil {
		t.report.note("no rows of TCP: they need iperf3 (apt-get install iperf3)")
		return nil
	}
	if t.c.Size == 0 {
		return nil
	}
	links, err := rtt.ReadLinks(t.lab)
	if err != nil {
		return err
	}
	server := -1
	if cpus := t.c.Server.CPUs; len(cpus) > 0 {
		server = cpus[0]
	}
	// As many bytes as SLMP sends, in as many streams.
	args := []string{"-n", strconv.FormatInt(t.c.Size*int64(t.c.Parallel), 10), "-P", strconv.Itoa(t.c.Parallel)}
	if m == TCP {
		if err := rtt.NoXDP(links); err != nil {
			return err
		}
	}
	for run := range t.c.Runs {
		progress(fmt.Sprintf("run %d of %d: %s", run+1, t.c.Runs, m.describe()))
		flow, err := testbed.IPerf(ctx, t.lab, t.c.SenderCPU, server, args...)
		if err != nil {
			return fmt.Errorf("%s: %w", m.describe(), err)
		}
		res := t.report.result(m, links)
		res.add(flow.Gbps, flow.Seconds)
		res.Retransmitted += flow.Retransmitted
	}
	return nil
}

func newReport(lab *netns.Lab, c Config, sum string) *Report {
	return &Report{
		Schema: 1,
		Env: Env{
			Kernel: testbed.Kernel(), CPUs: runtime.NumCPU(), Go: runtime.Version(), MTU: lab.MTU, Queues: lab.Queues,
			HPUs: c.Server.HPUs, NICWait: c.Server.Wait, NICCPUs: append([]int{}, c.Server.CPUs...),
			SenderCPU: c.SenderCPU, Window: c.Window, Dir: c.Server.Store.Dir,
		},
		Size: c.Size, Parallel: c.Parallel, SHA256: sum, Results: []*Result{},
	}
}
