// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/demos/file"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/netns/testbed"
)

// The demo starts xspin send. Here it is this executable.
func init() {
	if len(os.Args) > 1 && os.Args[1] == "_send" {
		os.Args[1] = "send"
		Main()
		os.Exit(0)
	}
}

func TestFileIsSentByXspinSend(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, window := range []string{"auto", "64"} {
		dir := t.TempDir()
		r, err := file.Run(t.Context(), lab, file.Config{
			Size: 5_000_000, Runs: 1, Parallel: 3, Into: []file.Into{file.IntoFile}, Window: window, Sender: []string{self, "_send"}, SenderCPU: -1, Keep: true,
			Server: file.ServerConfig{HPUs: 2, Wait: "adaptive", Store: file.StoreConfig{Dir: dir, MaxSize: 5_000_000}},
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
		// 3420 segments of 1462 bytes each.
		if len(r.Results) < 2 || r.Results[0].Segments != 3*3420 || r.Results[0].Seconds[0] <= 0 || r.Results[0].RTT[0] <= 0 || len(r.Files) != 3 {
			t.Errorf("window %s: %+v, kept %v", window, r.Results[0], r.Files)
		}
		for _, name := range r.Files {
			if info, err := os.Stat(name); err != nil || info.Size() != 5_000_000 {
				t.Errorf("window %s: %v, error %v", window, info, err)
			}
		}
	}
}

func TestFileServerSaysHowManyPlacesThereAre(t *testing.T) {
	lab := &netns.Lab{}
	c := file.ServerConfig{Into: file.IntoWindow, Store: file.StoreConfig{Dir: "d", MaxSize: 64 << 20}}
	if s := servingFiles(lab, c, 4, "/tmp/s"); !strings.Contains(s, "The window has 4 places of 64 MiB, each for a message.") || !strings.Contains(s, "--retries") ||
		!strings.Contains(s, "handlers on HPUs put them into the window") || !strings.Contains(s, "sudo XSPIN_SOCKET=/tmp/s xspin stats\n") {
		t.Errorf("said %s", s)
	}
	c.Into = file.IntoFile
	if s := servingFiles(lab, c, 170, ""); strings.Contains(s, "place") || strings.Contains(s, "XSPIN_SOCKET") {
		t.Errorf("said %s", s)
	}
}

func TestFileFlags(t *testing.T) {
	parse := func(line string) (file.Config, error) {
		var f fileFlags
		fl, err := parseFlags(f.bind, line)
		if err != nil {
			return file.Config{}, err
		}
		return f.config(fl.Changed)
	}

	t.Run("the defaults", func(t *testing.T) {
		got, err := parse("")
		want := file.Config{
			Size: 256 << 20, Runs: 3, Parallel: 1, Into: file.Intos, Window: "auto", SenderCPU: -1,
			Server: file.ServerConfig{HPUs: 16, Wait: "adaptive", Store: file.StoreConfig{MaxSize: 256 << 20}},
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("error %v\ngot  %+v\nwant %+v", err, got, want)
		}
	})
	for _, tc := range []struct {
		line, dir string
		limit     int64
	}{
		{"--serve", ".", 1 << 30},
		{"--serve --dir /tmp", "/tmp", 1 << 30},
		{"--dir /tmp --size 0", "/tmp", 1},
		{"--size 2MiB --max-size 1MiB", "", 1 << 20},
		{"--serve --max-size 4GiB", ".", 4 << 30},
		{"--serve --into window", ".", 64 << 20},
		{"--serve --into window --max-size 1GiB", ".", 1 << 30},
		{"--into window --size 2MiB", "", 2 << 20},
	} {
		if got, err := parse(tc.line); err != nil || got.Server.Store.Dir != tc.dir || got.Server.Store.MaxSize != tc.limit {
			t.Errorf("%s: directory %q, at most %d bytes, error %v", tc.line, got.Server.Store.Dir, got.Server.Store.MaxSize, err)
		}
	}
	for line, sync := range map[string]bool{"": false, "--serve": false, "--sync": true, "--serve --sync": true} {
		if got, err := parse(line); err != nil || got.Server.Store.Sync != sync {
			t.Errorf("%s: sync %v, error %v", line, got.Server.Store.Sync, err)
		}
	}
	for line, into := range map[string][]file.Into{
		"":                                 file.Intos,
		"--tier user":                      {file.IntoFile, file.IntoWindow},
		"--tier kernel":                    {file.IntoXDP, file.IntoTC},
		"--hook tc":                        {file.IntoFile, file.IntoWindow, file.IntoTC},
		"--tier kernel --hook tc,xdp":      {file.IntoTC, file.IntoXDP},
		"--into window":                    {file.IntoWindow, file.IntoXDP, file.IntoTC},
		"--into file":                      {file.IntoFile},
		"--into window,file":               {file.IntoWindow, file.IntoXDP, file.IntoTC, file.IntoFile},
		"--into window --tier kernel":      {file.IntoXDP, file.IntoTC},
		"--into file,window --tier kernel": {file.IntoXDP, file.IntoTC},
	} {
		if got, err := parse(line); err != nil || !slices.Equal(got.Into, into) {
			t.Errorf("%s: into %v, error %v, want %v", line, got.Into, err, into)
		}
	}
	for line, into := range map[string]file.Into{"--serve": file.IntoFile, "--serve --into window": file.IntoWindow, "--serve --tier kernel": file.IntoTC, "--serve --tier kernel --hook xdp": file.IntoXDP} {
		if got, err := parse(line); err != nil || got.Server.Into != into || got.Server.Places < 1 {
			t.Errorf("%s: into %q, %d places, error %v", line, got.Server.Into, got.Server.Places, err)
		}
	}
	t.Run("--pin gives sender and receiver the CPUs of this process", func(t *testing.T) {
		sender, receiver := pinTo(testbed.CPUs())
		got, err := parse("--pin")
		if err != nil || got.SenderCPU != sender || !slices.Equal(got.Server.CPUs, receiver) {
			t.Errorf("sender %d, receiver %v, error %v, want %d, %v", got.SenderCPU, got.Server.CPUs, err, sender, receiver)
		}
	})

	checkFlags(t, parse, []flagCase{
		{"--size 0", "--size -1", "--size -1: want 0 to 4GiB: bytes, or with KiB, MiB or GiB"},
		{"--size 4GiB", "--size 5GiB", "--size 5GiB: want 0 to"},
		{"--size 1000", "--size 1e3", "--size 1e3: want 0 to"},
		{"--size 64KiB", "--size 64kB", "--size 64kB: want 0 to"},
		{"--size 64KiB", "--size 9999999999999GiB", "--size 9999999999999GiB: want 0 to"},
		{"--max-size 1", "--max-size 0", "--max-size 0: want 1 to"},
		{"--runs 1", "--runs 0", "--runs 0: want 1 to 1000"},
		{"--parallel 64", "--parallel 0", "--parallel 0: want 1 to 1024"},
		{"--parallel 1024", "--parallel 1025", "--parallel 1025: want 1 to 1024"},
		{"--into window,file", "--into stack", "--into stack: want file, window"},
		{"--into window", "--into window,window", "--into window,window: want file, window"},
		{"--into file", "--into=", "--into : want file, window"},
		{"--serve --into window", "--serve --into file,window", "--into file,window: with --serve file or window, not both"},
		{"--tier kernel", "--tier hardware", "--tier hardware: want user, kernel or both"},
		{"--tier kernel,user", "--tier kernel,kernel", "--tier kernel,kernel: want user, kernel or both"},
		{"--into window --tier kernel", "--into file --tier kernel", "--tier kernel: handlers in eBPF put messages into a window: want --into window"},
		{"--serve --tier kernel", "--serve --into window --tier user,kernel", "--tier user,kernel: with --serve user or kernel, not both"},
		{"--serve --tier user", "--serve --tier user,kernel", "--tier user,kernel: with --serve user or kernel, not both"},
		{"--window 1", "--window 0", "--window 0: want auto, or segments"},
		{"--window auto", "--window wide", "--window wide: want auto, or segments"},
		{"--sender-cpu -1", "--sender-cpu -2", "--sender-cpu -2: want a CPU number"},
		{"--sender-cpu -1", "--sender-cpu 1023", "--sender-cpu 1023: not one of the"},
		{"--nic-cpu=", "--nic-cpu -1", "--nic-cpu -1: want a CPU number"},
		{"--hpus 64", "--hpus 65", "--hpus 65: want 1 to 64"},
		{"--wait spin", "--wait block", "--wait block: want adaptive, sleep or spin"},
		{"--pin", "--pin --sender-cpu 0", "--pin true: not with --sender-cpu or --nic-cpu"},
		{"--serve", "--serve --json", "--json true: not with --serve"},
		{"--keep --dir .", "--keep", "--keep true: want --dir too"},
		{"--serve --dir .", "--serve --dir . --keep", "--keep true: want --dir too; and not with --serve"},
	})

	refusedFirst(t, newFileCmd(), "demo file: --size much", "--size", "much")
}

func TestWhatIsReceivedIsTold(t *testing.T) {
	r := file.Received{Source: netip.MustParseAddrPort("10.0.0.2:40001"), Number: 7, Path: "dir/10.0.0.2-40001-7", Bytes: 1 << 20, Took: 8 * time.Millisecond, SHA256: "abc"}
	bad := file.Received{Source: r.Source, Number: 8, Err: errors.New("longer than 100 bytes, which is the limit")}
	for _, tc := range []struct {
		r    file.Received
		want string
	}{
		{r, "abc  dir/10.0.0.2-40001-7  1 MiB in 8ms, 1.049 Gbit/s\n"},
		{file.Received{Path: "p", Bytes: 5, SHA256: "abc"}, "abc  p  5 B\n"},
		{bad, "not received: message 8 from 10.0.0.2:40001: longer than 100 bytes, which is the limit\n"},
	} {
		var b bytes.Buffer
		if writeReceived(&b, tc.r); b.String() != tc.want {
			t.Errorf("got %q, want %q", b.String(), tc.want)
		}
	}
}
