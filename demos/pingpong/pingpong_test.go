// SPDX-License-Identifier: Apache-2.0

package pingpong

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/internal/quantile"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
)

func TestMain(m *testing.M) {
	for _, main := range []func([]string) (bool, error){rtt.Main, Main} {
		if ok, err := main(os.Args[1:]); ok {
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// fakeNIC is a UDP socket on the NIC's address; ICMP is left to Linux.
type fakeNIC struct {
	cfg    ServerConfig
	sock   *net.UDPConn
	closed int
	err    error
}

func (f *fakeNIC) Breakdown(p rtt.Proto, replies int) Breakdown {
	wait := 1500 * time.Nanosecond
	if p == rtt.ICMP {
		wait = time.Hour // longer than any round trip
	}
	return Breakdown{
		ArrivalToHandler: slices.Repeat([]int64{int64(wait)}, replies), Handler: slices.Repeat([]int64{250}, replies),
	}
}

func (f *fakeNIC) Close() error {
	f.closed++
	if f.sock != nil {
		f.sock.Close()
	}
	return f.err
}

// withNIC makes mode nic start a fake one, whose answer to a datagram is what
// reply makes of it; without reply nobody listens.
func withNIC(t *testing.T, reply func([]byte) []byte) *fakeNIC {
	t.Helper()
	before := startNIC
	t.Cleanup(func() { startNIC = before })
	f := &fakeNIC{}
	startNIC = func(_ context.Context, lab *netns.Lab, c ServerConfig) (NICServer, error) {
		f.cfg = c
		if reply == nil {
			return f, nil
		}
		err := lab.NIC.NS.Do(func() (err error) {
			f.sock, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port)))
			return err
		})
		if err != nil {
			return nil, err
		}
		go func() {
			b := make([]byte, 1<<16)
			for {
				n, from, err := f.sock.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				f.sock.WriteToUDPAddrPort(reply(b[:n]), from)
			}
		}()
		return f, nil
	}
	return f
}

func config(m ...Mode) Config {
	return Config{
		Protos: []rtt.Proto{rtt.ICMP, rtt.UDP}, Modes: m, Sizes: []int{16, 1416}, Count: 200, Warmup: 20,
		Timeout: 10 * time.Second, ClientWait: rtt.Block, ClientCPU: -1,
		Server: ServerConfig{HPUs: 16, Wait: "adaptive"},
	}
}

func same(b []byte) []byte { return b }

func TestRunMeasuresEverythingAskedForInTheLab(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	nic := withNIC(t, same)
	var told []string
	r, err := Run(t.Context(), lab, config(Host, NIC), func(s string) { told = append(told, s) })
	if err != nil {
		t.Fatal(err)
	}
	if nic.closed != 1 || !slices.Equal(nic.cfg.Protos, []rtt.Proto{rtt.ICMP, rtt.UDP}) || nic.cfg.HPUs != 16 {
		t.Errorf("NIC closed %d times, set up as %+v", nic.closed, nic.cfg)
	}
	if len(told) != 8 {
		t.Errorf("progress told %d times, want 8: %q", len(told), told)
	}

	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Schema int
		Env    map[string]any
		Result []map[string]any `json:"results"`
	}
	if err := json.Unmarshal(b.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	if doc.Schema != 1 || len(doc.Result) != 8 {
		t.Fatalf("schema %d, %d results", doc.Schema, len(doc.Result))
	}
	for _, key := range []string{"kernel", "cpu", "cpus", "go", "gomaxprocs", "client_wait", "client_cpu", "hpus", "nic_wait", "nic_cpus", "app_spin_us", "links"} {
		if v := doc.Env[key]; v == nil || v == "" || v == "unknown" {
			t.Errorf("env has %s = %v", key, v)
		}
	}
	links := doc.Env["links"].(map[string]any)
	for _, mode := range []string{"host", "nic"} {
		ends := links[mode].([]any)
		for i, device := range []string{lab.NIC.Device, lab.Host.Device} {
			if e := ends[i].(map[string]any); e["device"] != device || e["xdp"] != "none" || e["tso"] != true {
				t.Errorf("%s: end %d is %v", mode, i, e)
			}
		}
	}
	for i, res := range doc.Result {
		want := fmt.Sprint([]string{"host", "nic"}[i/4], []string{"icmp", "udp"}[i/2%2], []int{16, 1416}[i%2])
		if got := fmt.Sprint(res["mode"], res["proto"], res["size"]); got != want {
			t.Errorf("result %d is %s, want %s", i, got, want)
		}
		if tier := []any{nil, "user"}[i/4]; res["tier"] != tier || res["count"] != 200.0 || res["lost"] != 0.0 {
			t.Errorf("result %d: %v", i, res)
		}
		us := res["rtt_us"].(map[string]any)
		ci := us["ci95"].([]any)
		order := []float64{0, us["min"].(float64), ci[0].(float64), us["p50"].(float64), ci[1].(float64), us["p99"].(float64), 1e7}
		if !slices.IsSorted(order) || order[1] == 0 || us["p95"].(float64) > us["p99"].(float64) {
			t.Errorf("result %d: %v", i, us)
		}
		down, _ := res["breakdown_us"].(map[string]any)
		switch {
		case res["mode"] == "host":
			if _, has := res["breakdown_us"]; has {
				t.Errorf("result %d of mode host has a breakdown", i)
			}
		case res["proto"] == "udp":
			if rest := down["wire_and_client"].(float64); rest <= us["min"].(float64)-1.75 || rest >= us["p95"].(float64) || down["arrival_to_handler"] != 1.5 || down["handler"] != 0.25 {
				t.Errorf("result %d: breakdown %v of %v", i, down, us)
			}
		case down["wire_and_client"] != 0.0:
			t.Errorf("result %d: breakdown %v, want nothing left for the wire", i, down)
		}
		if got := len(res); got != map[bool]int{true: 6, false: 8}[res["mode"] == "host"] {
			t.Errorf("result %d has %d keys: %v", i, got, res)
		}
	}
	checkText(t, r, 4)
}

// checkText reads back what people are shown.
func checkText(t *testing.T, r *Report, rows int) {
	t.Helper()
	var b strings.Builder
	if err := r.WriteText(&b); err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(b.String(), "\n") {
		if n := utf8.RuneCountInString(line); n > 100 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	medians, _, _ := strings.Cut(b.String(), "\nAll round trips")
	medians, _, _ = strings.Cut(medians, "\nMedians, over")
	compared := regexp.MustCompile(`(?m)^ +(icmp|udp) +\d+( +(-|none|[\d.]+( +\[[\d.]+,[\d.]+\])?))+( +(-|[\d.]+))* *$`)
	if got := len(compared.FindAllString(medians, -1)); got != rows {
		t.Errorf("%d rows compared, want %d", got, rows)
	}
	listed := regexp.MustCompile(`(?m)^ +(icmp|udp) +(host|nic|nic/xdp|nic/tc|host\+nic)( +\d+){4}( +(-|[\d.]+)){8}$`)
	if got := len(listed.FindAllString(b.String(), -1)); got != len(r.Results) {
		t.Errorf("%d results listed, want %d", got, len(r.Results))
	}
	if t.Failed() {
		t.Log("\n" + b.String())
	}
}

func TestRunTellsOfPingsNotAnsweredAsTheyShould(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	pings := 0
	for _, tc := range []struct {
		name      string
		reply     func([]byte) []byte
		lost, bad int
	}{
		{"nobody listens", nil, 200, 0},
		{"a byte is flipped", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, 0, 200},
		{"a byte is flipped once", func(b []byte) []byte {
			if pings++; pings%220 == 100 { // once per run of 20 and 200
				b[8] ^= 1
			}
			return b
		}, 0, 1},
		{"a reply is cut short", func(b []byte) []byte { return b[:len(b)-1] }, 0, 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			withNIC(t, tc.reply)
			c := config(NIC)
			if tc.reply == nil {
				// Linux refuses some pings and, to spare the network, is silent
				// about the rest.
				c.Protos, c.Timeout = []rtt.Proto{rtt.UDP}, time.Millisecond
			}
			r, err := Run(t.Context(), lab, c, nil)
			if !errors.Is(err, ErrReplies) {
				t.Errorf("error %v, want ErrReplies", err)
			}
			if want := 2 * len(c.Protos); len(r.Results) != want {
				t.Fatalf("%d results, want all %d", len(r.Results), want)
			}
			for _, res := range r.Results {
				switch res.Proto {
				case rtt.ICMP: // Linux answers these
					if res.Lost != 0 || res.Bad != 0 || res.RTT == nil {
						t.Errorf("%+v", res)
					}
				case rtt.UDP:
					if res.Lost != tc.lost || res.Bad != tc.bad || (res.RTT == nil) != (tc.lost+tc.bad == res.Count) || (res.RTT == nil) != (res.Breakdown == nil) {
						t.Errorf("%+v", res)
					}
				}
			}
			checkText(t, r, len(r.Results))
		})
	}
}

func TestRunRefusesABaselineWithXDP(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	c := config(Host)
	c.Protos, c.Sizes, c.Count = []rtt.Proto{rtt.ICMP}, []int{16}, 10
	for _, p := range []netns.Port{lab.NIC, lab.Host} {
		prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type:         ebpf.XDP,
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
			License:      "Apache-2.0",
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, mode := range []struct {
			name  string
			flags link.XDPAttachFlags
		}{{"native", link.XDPDriverMode}, {"generic", link.XDPGenericMode}} {
			var l link.Link
			if err := p.NS.Do(func() (err error) {
				l, err = link.AttachXDP(link.XDPOptions{Program: prog, Interface: p.Index, Flags: mode.flags})
				return err
			}); err != nil {
				t.Fatal(err)
			}
			_, err = Run(t.Context(), lab, c, nil)
			if !errors.Is(err, rtt.ErrXDP) || !strings.Contains(err.Error(), p.Device) || !strings.Contains(err.Error(), mode.name) {
				t.Errorf("%s program on %s: error %v", mode.name, p.Device, err)
			}
			l.Close()
		}
		prog.Close()
	}
	if _, err := Run(t.Context(), lab, c, nil); err != nil {
		t.Errorf("with the programs gone: %v", err)
	}
}

func TestRunPassesErrorsOn(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	boom := errors.New("boom")
	t.Run("of the NIC that does not start", func(t *testing.T) {
		withNIC(t, same)
		startNIC = func(context.Context, *netns.Lab, ServerConfig) (NICServer, error) { return nil, boom }
		if _, err := Run(t.Context(), lab, config(NIC), nil); !errors.Is(err, boom) {
			t.Errorf("error %v", err)
		}
		if err := Serve(t.Context(), lab, ServerConfig{}, func() { t.Error("ready") }); !errors.Is(err, boom) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("of the NIC that does not close", func(t *testing.T) {
		withNIC(t, same).err = boom
		r, err := Run(t.Context(), lab, config(NIC), nil)
		if !errors.Is(err, boom) || len(r.Results) != 4 {
			t.Errorf("error %v, %d results", err, len(r.Results))
		}
	})
	t.Run("of a context that ends, with the results so far", func(t *testing.T) {
		nic := withNIC(t, same)
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		r, err := Run(ctx, lab, config(NIC), func(string) {
			if n++; n == 3 {
				cancel()
			}
		})
		if !errors.Is(err, context.Canceled) || len(r.Results) != 2 || nic.closed != 1 {
			t.Errorf("error %v, %d results, NIC closed %d times", err, len(r.Results), nic.closed)
		}
	})
	t.Run("of sizes that do not fit", func(t *testing.T) {
		for _, size := range []int{0, 7, 1473} {
			c := config(Host)
			c.Sizes = []int{size}
			if _, err := Run(t.Context(), lab, c, nil); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), fmt.Sprint("size ", size)) {
				t.Errorf("size %d: error %v", size, err)
			}
		}
	})
	t.Run("of configs with nothing to do, or an unknown mode", func(t *testing.T) {
		for _, change := range []func(*Config){
			func(c *Config) { c.Protos = nil },
			func(c *Config) { c.Modes = nil },
			func(c *Config) { c.Sizes = nil },
			func(c *Config) { c.Modes = []Mode{"fpga"} },
		} {
			c := config(Host)
			change(&c)
			if _, err := Run(t.Context(), lab, c, nil); !errors.Is(err, ErrConfig) {
				t.Errorf("error %v, want ErrConfig", err)
			}
		}
	})
}

func TestServeStaysUntilItsContextEnds(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	nic := withNIC(t, same)
	ctx, cancel := context.WithCancel(t.Context())
	served := false
	err := Serve(ctx, lab, ServerConfig{Protos: []rtt.Proto{rtt.UDP}}, func() {
		r, err := rtt.Ping(ctx, lab.Host.NS, rtt.Options{Proto: rtt.UDP, Remote: netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port), Size: 16, Count: 10, CPU: -1})
		served = err == nil && len(r.Samples) == 10 && nic.closed == 0
		cancel()
	})
	if err != nil || !served || nic.closed != 1 {
		t.Errorf("error %v, served %t, NIC closed %d times", err, served, nic.closed)
	}
}

// The widest numbers that a lab without delays can produce still fit the terminal.
func TestTextFits(t *testing.T) {
	us := &RTT{12345.67, 12345.78, 34567.89, 99999.49, quantile.Interval{12345.78, 34567.89}}
	r := &Report{Env: Env{
		Kernel: "Linux 6.18.44 x86_64", CPU: "Some CPU", ClientWait: rtt.Block, ClientCPU: 127, NICCPUs: []int{1, 2, 3}, NICWait: "adaptive",
		Links: map[Mode][]rtt.LinkState{},
	}}
	for _, m := range Modes {
		r.Env.Links[m] = []rtt.LinkState{{Device: "xs-nic", XDP: "native"}}
		r.Results = append(r.Results, Result{Proto: rtt.ICMP, Mode: m, Size: 1472, Count: 10000, Lost: 9999, RTT: us,
			Breakdown: &Micros{12345.78, 12345.78, 12345.67, 12345.67}})
	}
	checkText(t, r, 1)

	r.Results = r.Results[3:] // one mode alone is compared with nothing
	checkText(t, r, 1)
}

func TestTextComparesAllModesWithHost(t *testing.T) {
	at := func(us float64) *RTT { return &RTT{us, us, us, us, quantile.Interval{us, us}} }
	r := &Report{Env: Env{Links: map[Mode][]rtt.LinkState{Host: {}, NIC: {}, HostNIC: {}}}, Results: []Result{
		{Proto: rtt.UDP, Mode: Host, Size: 16, RTT: at(40)},
		{Proto: rtt.UDP, Mode: NIC, Size: 16, RTT: at(10)},
		{Proto: rtt.UDP, Mode: HostNIC, Size: 16, RTT: at(20)},
		{Proto: rtt.UDP, Mode: HostNIC, Size: 516},
	}}
	var b strings.Builder
	r.compare(&b)
	want := `
  proto  size                 host                  nic             host+nic  nic/host  h+n/host
    udp    16  40.00 [40.00,40.00]  10.00 [10.00,10.00]  20.00 [20.00,20.00]      0.25      0.50
    udp   516                    -                    -                 none         -         -
`
	if !strings.HasSuffix(b.String(), want) {
		t.Errorf("%s\nwant %s", b.String(), want)
	}
}

// In the report the kernel tier is mode nic, like the other, and mode host has none; the text
// tells them apart.
func TestHandlersInEBPFAnswer(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	c := config(Host, XDP, TC, NIC)
	c.Server.HPUs = 2
	c.Count, c.Warmup = 20, 2
	r, err := Run(t.Context(), lab, c, nil)
	if err != nil {
		t.Fatal(err)
	}
	tiers := ""
	for _, res := range r.Results {
		tiers += fmt.Sprintf("%s %s %s, ", res.Mode, res.Tier, res.Hook)
		if res.Lost != 0 || res.Bad != 0 || res.RTT == nil || (res.Breakdown == nil) != (res.Mode == Host || res.Tier == "kernel") {
			t.Errorf("%+v, %+v, %+v", res, res.RTT, res.Breakdown)
		}
	}
	if want := strings.Repeat("host  , ", 4) + strings.Repeat("nic kernel xdp, ", 4) + strings.Repeat("nic kernel tc, ", 4) + strings.Repeat("nic user , ", 4); tiers != want {
		t.Errorf("results of %s\nwant %s", tiers, want)
	}
	for i, l := range slices.Concat(r.Env.Links[XDP], r.Env.Links[TC]) {
		if want := map[bool]string{true: "native", false: "none"}[i < 2]; l.XDP != want {
			t.Errorf("end %d is %+v, want XDP %s", i, l, want)
		}
	}
	if l, err := rtt.ReadLinks(lab); err != nil || l[0].XDP != "none" || l[1].XDP != "none" {
		t.Errorf("afterwards: %+v, %v", l, err)
	}
	checkText(t, r, 4)
}

func TestHandlersAndApplicationAnswerTogether(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	c := config(HostNIC)
	c.Server.HPUs, c.Server.AppSpin = 2, time.Microsecond
	c.Count, c.Warmup, c.Timeout = 20, 2, 2*time.Second
	r, err := Run(t.Context(), lab, c, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 4 {
		t.Fatalf("%d results", len(r.Results))
	}
	// Replies with a wrong checksum never reach the client.
	for _, res := range r.Results {
		if res.Lost != 0 || res.Bad != 0 || res.RTT == nil || res.Breakdown == nil || res.Breakdown.Handler <= 0 ||
			res.Breakdown.Host <= 0 || res.Breakdown.Host >= res.RTT.P50 {
			t.Errorf("%+v, %+v, %+v", res, res.RTT, res.Breakdown)
		}
	}
	checkText(t, r, 4)
}

// Whoever answers computes no checksum that vouches for bytes which were damaged on their
// way: the client gets the right answer, or none.
func TestDamagedRequestsAreNotAnswered(t *testing.T) {
	for _, mode := range Modes {
		t.Run(string(mode), func(t *testing.T) {
			lab := netnstest.Temp(t, netns.LabConfig{Path: &impair.Config{Corrupt: 0.3, Direction: impair.FromHost, Seed: 7}})
			c := ServerConfig{Mode: mode, Protos: []rtt.Proto{rtt.ICMP, rtt.UDP}, HPUs: 1, Wait: "adaptive"}
			if mode == Host {
				echo, err := rtt.StartEcho(lab.NIC.NS, rtt.EchoOptions{Addr: netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port), CPU: -1})
				if err != nil {
					t.Fatal(err)
				}
				defer echo.Close()
			} else {
				s, err := start(t.Context(), lab, c)
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
			}
			for _, proto := range c.Protos {
				r, err := rtt.Ping(t.Context(), lab.Host.NS, rtt.Options{
					Proto: proto, Remote: netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port), Size: 64, Count: 30, Timeout: 50 * time.Millisecond, CPU: -1,
				})
				if err != nil {
					t.Fatal(err)
				}
				// A raw socket takes pings whose checksum is wrong, and handlers in eBPF leave the
				// damage in the reply, with a checksum that says so.
				passesOn := mode == XDP && proto == rtt.ICMP
				if r.Bad != 0 && !passesOn || r.Lost == 0 || len(r.Samples) == 0 {
					t.Errorf("%v: %d right answers, %d wrong ones, %d none", proto, len(r.Samples), r.Bad, r.Lost)
				}
			}
		})
	}
}

func TestTheApplicationIsAnotherUser(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	ping := func(timeout time.Duration) (int, error) {
		r, err := rtt.Ping(t.Context(), lab.Host.NS, rtt.Options{
			Proto: rtt.UDP, Remote: netip.AddrPortFrom(lab.NIC.Addr.Addr(), Port), Size: 16, Count: 5, Timeout: timeout, CPU: -1,
		})
		return len(r.Samples), err
	}
	s, err := start(t.Context(), lab, ServerConfig{Mode: HostNIC, Protos: []rtt.Proto{rtt.UDP}, HPUs: 1, Wait: "adaptive"})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			s.Close()
		}
	}()
	dir := filepath.Dir(s.(shared).Socket)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.(shared).Pid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`(?m)^Uid:(\s65534){4}$`, `(?m)^Gid:(\s65534){4}$`, `(?m)^Groups:\s*$`, `(?m)^CapEff:\s0+$`} {
		if !regexp.MustCompile(want).Match(status) {
			t.Errorf("status of the application does not have %s:\n%s", want, status)
		}
	}
	s.Breakdown(rtt.UDP, 0) // of tests before
	if n, err := ping(10 * time.Second); err != nil || n != 5 {
		t.Errorf("%d of 5 pings answered, error %v", n, err)
	}
	if b := s.Breakdown(rtt.UDP, 5); len(b.ArrivalToHandler) != 5 || len(b.Handler) != 5 || len(b.Host) != 5 || slices.Min(b.Host) <= 0 || slices.Min(b.Handler) <= 0 {
		t.Errorf("breakdown %+v", b)
	}
	if b := s.Breakdown(rtt.UDP, 0); len(b.ArrivalToHandler)+len(b.Handler)+len(b.Host) > 0 {
		t.Errorf("breakdown %+v without pings", b)
	}

	if err := s.(shared).Kill(); err != nil {
		t.Fatal(err)
	}
	// Linux says that nobody listens, once the context is not active any more.
	if n, err := ping(50 * time.Millisecond); err != nil || n != 0 {
		t.Errorf("%d of 5 pings answered without the application, error %v", n, err)
	}
	closed = true
	if err := s.Close(); !errors.Is(err, rtt.ErrChild) || !strings.Contains(err.Error(), "killed") {
		t.Errorf("closed with error %v, want one about the application", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", dir, err)
	}
}

func TestPartsOfARoundTripAddUp(t *testing.T) {
	// A warm-up of two and eight pings, of which the 1st and 2nd are the fastest and the
	// 3rd and 4th the slowest.
	rtts := []int64{1000, 1000, 90000, 90000, 10000, 20000, 30000, 40000}
	b := Breakdown{
		ArrivalToHandler: []int64{7777, 7777, 9, 9, 9, 9, 1000, 2000, 3000, 4000},
		Handler:          []int64{7777, 7777, 9, 9, 9, 9, 100, 200, 300, 400},
		Host:             []int64{7777, 7777, 9, 9, 9, 9, 5000, 6000, 7000, 8000},
	}
	if got, want := newMicros(b, rtts, 2), (Micros{WireAndClient: 15.75, ArrivalToHandler: 2.5, Handler: 0.25, Host: 6.5}); got == nil || *got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	b.Host = nil
	if got, want := newMicros(b, rtts, 2), (Micros{WireAndClient: 22.25, ArrivalToHandler: 2.5, Handler: 0.25}); got == nil || *got != want {
		t.Errorf("%+v, want %+v without an application", got, want)
	}
	if got := newMicros(b, rtts[1:], 2); got != nil {
		t.Errorf("%+v though a reply was lost", got)
	}
	if got := newMicros(Breakdown{}, nil, 0); got != nil {
		t.Errorf("%+v without pings", got)
	}
	long := make([]int64, 1<<15)
	first := long[:1<<14]
	if got := newMicros(Breakdown{ArrivalToHandler: first, Handler: first}, long, 100); got == nil {
		t.Error("nothing about more pings than are noted")
	}
}

func TestServerOfBothStartsNotWithoutItsApplication(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := start(ctx, lab, ServerConfig{Mode: HostNIC, Protos: []rtt.Proto{rtt.UDP}, HPUs: 1, Wait: "adaptive"}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	_, err := start(t.Context(), lab, ServerConfig{Mode: HostNIC, Protos: []rtt.Proto{rtt.UDP}, HPUs: 1, Wait: "adaptive", CPUs: []int{1000}})
	if err == nil {
		t.Error("started on CPU 1000")
	}
	// Nothing is in the way of the next one.
	s, err := start(t.Context(), lab, ServerConfig{Mode: HostNIC, Protos: []rtt.Proto{rtt.ICMP}, HPUs: 1, Wait: "adaptive"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestHiddenCommandIsForOwnUse(t *testing.T) {
	for _, args := range [][]string{nil, {"demo"}, {rtt.PingCommand}} {
		if ok, err := Main(args); ok || err != nil {
			t.Errorf("Main(%q) = %t, %v", args, ok, err)
		}
	}
	for _, args := range [][]string{{AppCommand}, {AppCommand, "x"}, {AppCommand, "{}", "x"}} {
		if ok, err := Main(args); !ok || err == nil || !strings.Contains(err.Error(), "own use") {
			t.Errorf("Main(%q) = %t, %v", args, ok, err)
		}
	}
}
