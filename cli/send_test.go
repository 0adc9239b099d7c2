// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/handlers/handlerstest"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/internal/testenv"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/packet"
	"github.com/xspin/xspin/slmp"
	"github.com/xspin/xspin/spin"
)

func TestSendFlags(t *testing.T) {
	parse := func(line string) (slmp.Config, error) {
		var f sendFlags
		fl := pflag.NewFlagSet("send", pflag.ContinueOnError)
		f.bind(fl)
		if err := fl.Parse(strings.Fields(line)); err != nil {
			return slmp.Config{}, err
		}
		return f.config()
	}
	for line, want := range map[string]slmp.Config{
		"--to a":                           {Align: 1, Retries: 8},
		"--to a --window auto":             {Align: 1, Retries: 8},
		"--to a --window 256 --plain":      {Align: 1, Retries: 8, Window: 256, Plain: true},
		"--to a --mode first-last":         {Align: 1, Retries: 8, Mode: slmp.FirstLast},
		"--to a --mode none --gap 20us":    {Align: 1, Retries: 8, Mode: slmp.Unacknowledged, Gap: 20 * time.Microsecond},
		"--to a --align 64 --payload 1462": {Align: 64, Retries: 8, Payload: 1462},
		"--to a --retries 1":               {Align: 1, Retries: 1},
	} {
		if got, err := parse(line); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: error %v\ngot  %+v\nwant %+v", line, err, got, want)
		}
	}
	for line, says := range map[string]string{
		"":                                     "--to is missing",
		"--to a --mode all":                    "--mode all: want every, first-last or none",
		"--to a --window 0":                    "--window 0: want auto, or segments, 1 to",
		"--to a --window big":                  "--window big: want auto, or segments, 1 to",
		"--to a --window 16385":                "--window 16385: want auto, or segments, 1 to 16384",
		"--to a --gap -1us":                    "--gap -1µs: want 0 or more",
		"--to a --timeout -1s":                 "--timeout -1s: want 0 or more",
		"--to a --parallel 0":                  "--parallel 0: want 1 to 4096",
		"--to a --parallel 4097":               "--parallel 4097: want 1 to 4096",
		"--to a --repeat 0":                    "--repeat 0: want 1 or more",
		"--to a --align 0":                     "--align 0: want 1 or more",
		"--to a --payload -1":                  "--payload -1: want 0 or more",
		"--to a --payload 63 --align 64":       "--payload 63: is less than --align 64",
		"--to a --retries 0":                   "--retries 0: want 1 or more",
		"--to a --mode none --plain":           "--plain true: applies only to mode every",
		"--to a --mode first-last --window 16": "--window 16: applies only to mode every",
	} {
		if _, err := parse(line); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: error %v, want %q", line, err, says)
		}
	}
}

// sendPeer takes messages on loopback until the test ends: a NIC at the end of a socket.
type sendPeer struct {
	addr string
	mu   sync.Mutex
	open map[int][]byte    // by slot
	got  map[uint32][]byte // complete ones
}

func newSendPeer(t *testing.T) *sendPeer {
	t.Helper()
	sock, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	_ = testenv.ReadBuffer(sock, 4<<20)
	r := &sendPeer{addr: sock.LocalAddr().String(), open: map[int][]byte{}, got: map[uint32][]byte{}}
	n := handlerstest.New(t, handlerstest.Config{
		Handlers: hpu.Handlers{
			Header: func(h *hpu.HER) spin.Code {
				delete(r.open, h.Message().Slot())
				return spin.Success
			},
			Payload: func(h *hpu.HER) spin.Code {
				data, at := r.open[h.Message().Slot()], int(h.Offset())
				if need := at + h.PayloadLen(); need > len(data) {
					data = append(data, make([]byte, need-len(data))...)
				}
				for b := range h.Payload() {
					at += copy(data[at:], b)
				}
				r.open[h.Message().Slot()] = data
				return spin.Success
			},
			Completion: func(c *hpu.Completion) spin.Code {
				r.mu.Lock()
				defer r.mu.Unlock()
				if c.Cause == spin.Complete {
					r.got[c.Message().Number()] = r.open[c.Message().Slot()]
				}
				return spin.Success
			},
		},
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			size, from, err := sock.ReadFromUDPAddrPort(b)
			if err != nil {
				return // closed
			}
			out := n.Packet(handlerstest.UDP(from, handlerstest.Here(slmp.Port), b[:size]))
			for _, frame := range out.Sent {
				h := packet.Parse(frame, len(frame))
				_, _ = sock.WriteToUDPAddrPort(frame[h.Payload:][:h.PayloadLen], from)
			}
		}
	}()
	t.Cleanup(func() {
		sock.Close()
		<-done
	})
	return r
}

func (r *sendPeer) message(id uint32) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.got[id]
}

// send runs the command.
func send(ctx context.Context, stdin io.Reader, stderr io.Writer, args ...string) (stdout string, err error) {
	root := newRootCmd()
	var out strings.Builder
	root.SetOut(&out)
	root.SetErr(stderr)
	root.SetIn(stdin)
	root.SetArgs(append([]string{"send"}, args...))
	err = root.ExecuteContext(ctx)
	return out.String(), err
}

// fileOf makes a file of n bytes, no two alike.
func fileOf(t *testing.T, name string, n int) (path string, data []byte) {
	t.Helper()
	data = make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = r.Read(data)
	path = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, data
}

func TestSendDeliversFiles(t *testing.T) {
	r := newSendPeer(t)
	big, bigData := fileOf(t, "big", 3<<20+1)
	small, smallData := fileOf(t, "small", 5)
	empty, emptyData := fileOf(t, "empty", 0)
	for _, tc := range []struct {
		args     []string
		stdin    string
		payload  int
		messages [][]byte
	}{
		{[]string{big}, "", 0, [][]byte{bigData}},
		{[]string{"-"}, "from standard input", 0, [][]byte{[]byte("from standard input")}},
		{[]string{"-"}, "", 0, [][]byte{{}}},
		{[]string{empty}, "", 0, [][]byte{emptyData}},
		{[]string{big, small, "-", empty}, "in", 0, [][]byte{bigData, smallData, []byte("in"), emptyData}},
		{[]string{small, big, "--repeat", "3", "--parallel", "2"}, "", 0, [][]byte{smallData, bigData, smallData, bigData, smallData, bigData}},
		{[]string{big, "--payload", "1462", "--align", "64", "--window", "64"}, "", 1408, [][]byte{bigData}},
		{[]string{big, "--payload", "1462", "--plain"}, "", 1462, [][]byte{bigData}},
		{[]string{small, "--mode", "first-last"}, "", 0, [][]byte{smallData}},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			var stderr bytes.Buffer
			out, err := send(t.Context(), strings.NewReader(tc.stdin), &stderr, append(tc.args, "--to", r.addr, "--json")...)
			if err != nil {
				t.Fatal(err)
			}
			if stderr.Len() > 0 {
				t.Errorf("on standard error: %q", stderr.String())
			}
			var doc sendReport
			dec := json.NewDecoder(strings.NewReader(out))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&doc); err != nil {
				t.Fatalf("%v in %s", err, out)
			}
			total, segments := 0, uint64(0)
			if len(doc.Messages) != len(tc.messages) {
				t.Fatalf("%d messages, want %d: %s", len(doc.Messages), len(tc.messages), out)
			}
			for i, m := range doc.Messages {
				want := tc.messages[i]
				if m.Bytes != uint64(len(want)) || m.Error != "" || m.File == "" || m.Segments == 0 || m.Seconds <= 0 {
					t.Errorf("message %d: %+v", i, m)
				}
				if !bytes.Equal(r.message(m.ID), want) {
					t.Errorf("message %d: other bytes came", i)
				}
				total += len(want)
				segments += m.Segments
			}
			if doc.Schema != 1 || doc.To != r.addr || doc.Bytes != uint64(total) || doc.Segments != segments ||
				doc.Seconds <= 0 || total > 100 && doc.Gbps <= 0 || doc.RTT.Min <= 0 || doc.RTT.Smoothed < doc.RTT.Min || doc.Payload == 0 {
				t.Errorf("document %s", out)
			}
			if tc.payload > 0 && doc.Payload != tc.payload {
				t.Errorf("payload %d, want %d", doc.Payload, tc.payload)
			}
		})
	}

	out, err := send(t.Context(), nil, io.Discard, small, small, "--to", r.addr)
	if err != nil || !strings.HasPrefix(out, "2 messages, 10 B in ") || !strings.Contains(out, "2 segments of up to") || !strings.Contains(out, "round trip") {
		t.Errorf("for people: %q, error %v", out, err)
	}
	t.Setenv("XSPIN_SEND_TO", r.addr)
	if _, err := send(t.Context(), nil, io.Discard, small); err != nil {
		t.Errorf("receiver from the environment: %v", err)
	}
}

func TestSendRefusesBeforeItSends(t *testing.T) {
	small, _ := fileOf(t, "small", 5)
	dir := t.TempDir()
	long := filepath.Join(dir, "long")
	if err := os.WriteFile(long, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(long, slmp.MaxMessage+1); err != nil {
		t.Fatal(err)
	}
	none := filepath.Join(dir, "none")
	for says, args := range map[string][]string{
		"send: no FILE: name files, or - for standard input":                 {},
		"send: stat " + none + ": no such file or directory":                 {small, none},
		"send: " + dir + " is a directory: name the files in it, or pack it": {small, dir},
		"4294967297 bytes, at most 4294967296: split it":                     {small, long},
		"-: standard input can be read only once":                            {"-", small, "-"},
		"standard input can be read only once":                               {"-", "--repeat", "2"},
		"want 0 or more":                                                     {small, "--gap", "-1s"},
		"payload 70000: a path MTU ":                                         {small, "--payload", "70000"},
		"lookup":                                                             {small, "--to", "no-such-host.invalid"},
	} {
		// Whatever is sent is refused, which is another error.
		if out, err := send(t.Context(), nil, io.Discard, append([]string{"--to", "127.0.0.1:1"}, args...)...); err == nil || !strings.Contains(err.Error(), says) || out != "" {
			t.Errorf("%v: error %v, output %q, want %q", args, err, out, says)
		}
	}
	if os.Geteuid() != 0 {
		if err := os.Chmod(small, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := send(t.Context(), nil, io.Discard, "--to", "127.0.0.1:1", small); !errors.Is(err, os.ErrPermission) {
			t.Errorf("error %v, want permission denied", err)
		}
	}
}

func TestSendSaysWhatFailed(t *testing.T) {
	small, _ := fileOf(t, "small", 5)
	deaf, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	to := deaf.LocalAddr().String()

	t.Run("timeout", func(t *testing.T) {
		out, err := send(t.Context(), nil, io.Discard, small, small, small, "--to", to, "--parallel", "1", "--timeout", "20ms", "--json")
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), small+": ") || !strings.Contains(err.Error(), "--timeout of 20ms") || !strings.Contains(err.Error(), "\n2 more messages were not sent") {
			t.Errorf("error %v", err)
		}
		var doc sendReport
		if err := json.Unmarshal([]byte(out), &doc); err != nil {
			t.Fatalf("%v in %q", err, out)
		}
		if len(doc.Messages) != 3 || doc.Bytes != 0 || doc.Messages[0].Error == "" || doc.Messages[2].Error != errNotBegun.Error() {
			t.Errorf("document %s", out)
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		if _, err := send(ctx, nil, io.Discard, small, "--to", to); !errors.Is(err, context.Canceled) || err.Error() != "send: stopped by a signal: 1 message was sent only in part" {
			t.Errorf("error %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		if _, err := send(ctx, nil, io.Discard, small, "--to", to, "--repeat", "95330"); !errors.Is(err, context.Canceled) || !regexp.MustCompile(`^send: stopped by a signal: 9532[6-9] messages were not sent, and [1-4] only in part$`).MatchString(err.Error()) {
			t.Errorf("error %v", err)
		}
	})
	t.Run("silence", func(t *testing.T) {
		if _, err := send(t.Context(), nil, io.Discard, small, "--to", to, "--retries", "1"); !errors.Is(err, slmp.ErrSilent) || !strings.HasSuffix(err.Error(), "or because no receive is posted: see xspin log on its machine") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("nobody listens", func(t *testing.T) {
		deaf.Close()
		if out, err := send(t.Context(), nil, io.Discard, small, "--to", to); !errors.Is(err, slmp.ErrRefused) || out != "" {
			t.Errorf("error %v, output %q", err, out)
		}
	})
	t.Run("bad input", func(t *testing.T) {
		r := newSendPeer(t)
		broken := errors.New("broken pipe")
		in := io.MultiReader(strings.NewReader("some"), readerFunc(func([]byte) (int, error) { return 0, broken }))
		if _, err := send(t.Context(), in, io.Discard, "-", "--to", r.addr); !errors.Is(err, broken) {
			t.Errorf("error %v", err)
		}
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func TestSendDrawsOnATerminal(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer master.Close()
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	term, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	drawn := make(chan string)
	go func() {
		b, _ := io.ReadAll(master) // EIO when the other end is closed
		drawn <- string(b)
	}()
	r := newSendPeer(t)
	data := make([]byte, 500*1000)
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := send(t.Context(), nil, term, path, path, "--to", r.addr, "--payload", "1000", "--gap", "1ms", "--parallel", "1"); err != nil {
		t.Fatal(err)
	}
	term.Close()
	got := <-drawn
	if !strings.Contains(got, "%") || !strings.Contains(got, " of 976.6 KiB") || !strings.HasSuffix(got, "\r\x1b[K") {
		t.Errorf("drawn: %q", got)
	}
}

func TestSendSizesAndProgress(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB",
		1<<20 - 1: "1 MiB", 5 << 30: "5 GiB", 1 << 52: "4096 TiB",
	} {
		if got := file.Bytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
	for _, tc := range []struct {
		done, total, again uint64
		want               string
	}{
		{1e9, 0, 3, "953.7 MiB  8.00 Gbit/s  3 again"},
		{1e9, 4e9, 0, "[======                  ]  25 %  953.7 MiB of 3.7 GiB  8.00 Gbit/s  0 again  3s left"},
		{4e9, 4e9, 0, "[========================] 100 %  3.7 GiB of 3.7 GiB  32.00 Gbit/s  0 again"},
		{0, 4e9, 0, "[                        ]   0 %  0 B of 3.7 GiB  0.00 Gbit/s  0 again"},
		{5e9, 4e9, 0, "[========================] 100 %  4.7 GiB of 3.7 GiB  40.00 Gbit/s  0 again"},
	} {
		if got := progressLine(tc.done, tc.total, tc.again, time.Second); got != tc.want {
			t.Errorf("%+v:\ngot  %s\nwant %s", tc, got, tc.want)
		}
	}
	if got := fmt.Sprint(&sendReport{Bytes: 1 << 20, Seconds: 0.001, Gbps: 8.388608, Segments: 718, Retransmitted: 2, Payload: 1462}); got != "1 MiB in 0.001 s: 8.389 Gbit/s. 718 segments of up to 1462 bytes, 2 sent again" {
		t.Errorf("report %q", got)
	}
}

// However little the device takes, --timeout and Ctrl-C end it.
func TestSendEndsThoughNothingCanBeSent(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	// Frames that the other end does not take are dropped by the device, as if its queue
	// were full.
	if err := lab.NIC.NS.Do(func() error {
		l, err := netlink.LinkByName(lab.NIC.Device)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, 700)
	}); err != nil {
		t.Fatal(err)
	}
	dropped := func() (n uint64) {
		t.Helper()
		if err := lab.Host.NS.Do(func() error {
			l, err := netlink.LinkByName(lab.Host.Device)
			if err == nil {
				n = l.Attrs().Statistics.TxDropped
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, says string
		args       []string
		signal     os.Signal
	}{
		{"--timeout", "--timeout of 200ms", []string{"--timeout", "200ms"}, nil},
		{"Ctrl-C", "send: stopped by a signal: 1 message was sent only in part", nil, os.Interrupt},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			cmd := lab.Host.NS.Command(ctx, "/proc/self/exe", slices.Concat([]string{"send", "--to", lab.NIC.Addr.Addr().String()}, tt.args, []string{file})...)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if tt.signal != nil {
				for end, before := time.Now().Add(20*time.Second), dropped(); dropped() == before; time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatal("it does not begin to send")
					}
				}
				if err := cmd.Process.Signal(tt.signal); err != nil {
					t.Error(err)
				}
			}
			if err := cmd.Wait(); err == nil || ctx.Err() != nil || !strings.Contains(out.String(), tt.says) {
				t.Errorf("it ended with %v (%v): %s", err, ctx.Err(), out.String())
			}
		})
	}
}

// TestReportCountsWhatHasArrived: what was cut short is not told as done.
func TestReportCountsWhatHasArrived(t *testing.T) {
	for want, messages := range map[string][]sendMessage{
		"1 of 3 messages, and parts of others: 0 B in": {{}, {Error: "x"}, {Error: "y"}},
		"0 of 1 message, and parts of others: 0 B in":  {{Error: "x"}},
		"2 messages, 0 B in":                           {{}, {}},
		"0 B in":                                       {{}},
	} {
		if got := (&sendReport{Messages: messages}).String(); !strings.HasPrefix(got, want) {
			t.Errorf("%q does not begin with %q", got, want)
		}
	}
}
