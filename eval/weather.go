// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/report"
)

// A watcher looks at the machine while something is measured.
type watcher struct {
	before       string
	stolen, time float64
	quit         chan struct{}
	most         chan float64
}

// watch begins to.
func watch() *watcher {
	w := &watcher{before: loadAverage(), quit: make(chan struct{}), most: make(chan float64)}
	_, w.stolen, w.time = cpuTimes()
	go func() {
		most := 0.0
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		for {
			if x, err := strconv.ParseFloat(loadAverage(), 64); err == nil {
				most = max(most, x)
			}
			select {
			case <-tick.C:
			case <-w.quit:
				w.most <- most
				return
			}
		}
	}()
	return w
}

// stop returns what was seen.
func (w *watcher) stop() report.Weather {
	close(w.quit)
	out := report.Weather{Before: w.before, Most: <-w.most}
	if _, s, t := cpuTimes(); t > w.time {
		out.Stolen = (s - w.stolen) / (t - w.time)
	}
	return out
}

// loadAverage is the average over the last minute.
func loadAverage() string { return bench.Environment("", 0, 0).Load }

// environment describes this machine, and looks whether others use it now: the load average
// takes minutes to forget what has ended, such as the measurement before.
func environment(command string, runs int, d time.Duration) bench.Env {
	const look = 300 * time.Millisecond // 30 ticks of each CPU
	e := bench.Environment(command, runs, d)
	idle, stolen, all := cpuTimes()
	time.Sleep(look)
	idle2, stolen2, all2 := cpuTimes()
	if all2 > all {
		used := 1 - (idle2-idle+stolen2-stolen)/(all2-all)
		e.Used = &used
	}
	return e
}

// cpuTimes returns for how much time all CPUs were idle, how much a hypervisor gave to other
// machines, and how much there was, in ticks since boot: the sums of proc_stat(5).
func cpuTimes() (idle, stolen, all float64) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, 0
	}
	first, _, _ := strings.Cut(string(b), "\n")
	for i, f := range strings.Fields(first) {
		x, err := strconv.ParseFloat(f, 64)
		if err != nil || i > 8 { // guests are in user
			continue
		}
		all += x
		switch i {
		case 4, 5: // iowait, too
			idle += x
		case 8:
			stolen = x
		}
	}
	return idle, stolen, all
}

// waitedForCPU is how long the calling thread has been ready to run while others ran, 0 where
// the kernel does not tell: schedstat of proc(5).
func waitedForCPU() time.Duration {
	b, err := os.ReadFile("/proc/thread-self/schedstat")
	var ran, waited int64
	if err == nil {
		_, err = fmt.Sscan(string(b), &ran, &waited)
	}
	if err != nil {
		return 0
	}
	return time.Duration(waited)
}

// generatorWaits says what other threads took of the generator's CPU. Where that bounds the
// rate of packets, and not what receives them, the rate falls with it.
type generatorWaits struct {
	ours            bool // what receives is on that CPU too: then nobody can tell
	runs, disturbed int
	percent         []float64 // of the last run's time, if it can be told
	worst           float64
}

// disturbance is how much of a run is worth telling, in percent. A thread of the Go
// runtime that wakes every 90 us, as its monitor does, takes up to 10.
const disturbance = 20

func (w *generatorWaits) add(waited, took time.Duration) {
	w.percent = nil
	if w.ours {
		return
	}
	percent := 100 * float64(waited) / float64(max(took, 1))
	w.percent = []float64{percent}
	w.worst = max(w.worst, percent)
	w.runs++
	if percent > disturbance {
		w.disturbed++
	}
}

// warning is "" if the generator had its CPU.
func (w *generatorWaits) warning(cpu int) string {
	if w.disturbed == 0 {
		return ""
	}
	return fmt.Sprintf("others had the generator's CPU, %d, for more than %d %% of the time in %d of %d runs, for %.0f %% in the worst: where the generator is the bound, rates are lower by as much",
		cpu, disturbance, w.disturbed, w.runs, w.worst)
}

// A countdown tells what is being measured and how much time is left: once, and on a terminal
// every second.
type countdown struct {
	sync.Mutex
	to       io.Writer
	what     string
	until    time.Time
	terminal bool
	quit     chan struct{}
	done     chan struct{}
}

func startCountdown(to io.Writer, what string, left time.Duration) *countdown {
	c := &countdown{to: to, what: what, until: time.Now().Add(left), quit: make(chan struct{}), done: make(chan struct{})}
	if f, ok := to.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		c.terminal = err == nil
	}
	if !c.terminal {
		fmt.Fprintf(to, "%s: about %v left\n", what, left.Round(time.Second))
		close(c.done)
		return c
	}
	go func() {
		defer close(c.done)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			c.line()
			select {
			case <-tick.C:
			case <-c.quit:
				return
			}
		}
	}()
	return c
}

// line writes over the line that is there.
func (c *countdown) line() {
	c.Lock()
	defer c.Unlock()
	left := "soon done"
	if d := time.Until(c.until).Round(time.Second); d > 0 {
		left = fmt.Sprintf("about %v left", d)
	}
	fmt.Fprintf(c.to, "\r\x1b[K%s: %s", c.what, left)
}

// warn says something in a line of its own.
func (c *countdown) warn(msg string) {
	c.Lock()
	defer c.Unlock()
	if c.terminal {
		fmt.Fprint(c.to, "\r\x1b[K")
	}
	fmt.Fprintln(c.to, "warning:", msg)
}

func (c *countdown) end() {
	close(c.quit)
	<-c.done
	if c.terminal {
		fmt.Fprintf(c.to, "\r\x1b[K%s\n", c.what)
	}
}
