// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xspin/xspin/demos/datatypes"
	"github.com/xspin/xspin/netns/testbed"
)

func TestDatatypesFlags(t *testing.T) {
	parse := func(line string) (datatypes.Config, error) {
		var f datatypesFlags
		fl, err := parseFlags(f.bind, line)
		if err != nil {
			return datatypes.Config{}, err
		}
		c, err := f.config(fl.Changed)
		if err == nil {
			_, err = requestAddress(f.asked)
		}
		return c, err
	}

	t.Run("the defaults", func(t *testing.T) {
		got, err := parse("")
		want := datatypes.Config{
			Setup: datatypes.Setup{HPUs: 16, Wait: "adaptive", AppCPU: -1, SenderCPU: -1},
			Transfers: []datatypes.Transfer{
				{Name: "Simple", Type: "Simple", Count: 20, Parallel: 16, Strategy: "direct"},
				{Name: "Complex", Type: "Complex", Count: 20, Parallel: 16, Strategy: "direct"},
			},
			Runs: 7,
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("error %v\ngot  %+v\nwant %+v", err, got, want)
		}
	})
	t.Run("types as text and in files", func(t *testing.T) {
		name := filepath.Join(t.TempDir(), "t")
		if err := os.WriteFile(name, []byte("ctg(4)[int] // four\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := parse("--type hidx(0,1)[int] --type " + name + " --count 0")
		if err != nil || len(got.Transfers) != 2 || got.Transfers[0].Type != "hidx(0,1)[int]" || got.Transfers[0].Count != 1 ||
			got.Transfers[1].Name != name || got.Transfers[1].Type != "ctg(4)[int]" {
			t.Errorf("error %v, %+v", err, got.Transfers)
		}
	})
	t.Run("one type is served and sent", func(t *testing.T) {
		for _, flag := range []string{"--serve", "--send"} {
			if got, err := parse(flag); err != nil || len(got.Transfers) != 1 {
				t.Errorf("%s: error %v, %+v", flag, err, got.Transfers)
			}
		}
	})
	t.Run("--pin leaves a CPU to the application", func(t *testing.T) {
		first, second := pinTo(testbed.CPUs())
		app, nic := -1, []int(nil)
		if first >= 0 {
			app, nic = second[0], []int{first}
		}
		got, err := parse("--pin")
		if err != nil || got.SenderCPU != first || got.AppCPU != app || !slices.Equal(got.NICCPUs, nic) {
			t.Errorf("error %v, %+v", err, got.Setup)
		}
	})

	checkFlags(t, parse, []flagCase{
		{"--type simple", "--type=", "--type : want a name"},
		{"--type Simple", "--type vec(4", "--type vec(4: "},
		{"--type MILC", "--type nosuchtype", "--type nosuchtype: "},
		{"--serve --type Simple", "--serve --type Simple --type Complex", "one only with --serve and --send"},
		{"--count 1", "--count -1", "--count -1: want 1 to 4294967295"},
		{"--parallel 1", "--parallel 0", "--parallel 0: want 1 to 1024"},
		{"--parallel 1024", "--parallel 1025", "--parallel 1025: want 1 to 1024"},
		{"--runs 1", "--runs 0", "--runs 0: want 1 to 1000"},
		{"--strategy deposit", "--strategy magic", "--strategy magic: want one of direct, specialized, hpu-local, ro-cp, rw-cp, deposit"},
		{"--strategy rw-cp --interval 1", "--strategy rw-cp --interval -1", "--interval -1: want 1 to"},
		{"--strategy ro-cp --interval 1", "--interval 1", "--interval 1: applies only to --strategy ro-cp and rw-cp"},
		{"--app-cpu -1", "--app-cpu -2", "--app-cpu -2: want a CPU number"},
		{"--app-cpu -1", "--app-cpu 1023", "--app-cpu 1023: not one of the"},
		{"--sender-cpu -1", "--sender-cpu 1024", "--sender-cpu 1024: want a CPU number"},
		{"--pin", "--pin --app-cpu 0", "--pin true: not with --app-cpu"},
		{"--pin", "--pin --nic-cpu 0", "--pin true: not with --sender-cpu or --nic-cpu"},
		{"--hpus 64", "--hpus 65", "--hpus 65: want 1 to 64"},
		{"--overlap", "--overlap --serve", "--overlap true: not with --serve"},
		{"--send", "--send --serve", "--send true: not with --serve"},
		{"--json", "--json --send", "--json true: not with --send"},
		{"--json", "--json --serve", "--json true: not with --serve"},
		{"--serve --dir .", "--dir .", "--sender and --dir apply only to --serve"},
		{"--serve --verify --sender 10.0.0.2", "--serve --verify", "--verify true: with --serve only with --sender"},
		{"--verify", "--serve --verify --dir .", "--verify true: with --serve only with --sender"},
		{"--strategy specialized --type simple", "--strategy specialized --type complex", "complex: specialized is for blocks in a vector or a list, and this type is one of"},
		{"--count 20", "--count 4000000000", "invalid transfer: Simple"},
		{"--serve --sender 10.0.0.2", "--sender 10.0.0.2", "--sender and --dir apply only to --serve"},
		{"--serve --sender 10.0.0.2:9331", "--serve --sender host", "--sender host: want an IPv4 address"},
		{"--serve --sender 10.0.0.2:1", "--serve --sender 10.0.0.2:0", "--sender 10.0.0.2:0: want an IPv4 address"},
	})

	refusedFirst(t, newDatatypesCmd(), "demo datatypes: --parallel 0", "--parallel", "0")
}

func TestMessagesAndRequestsAreToldInLines(t *testing.T) {
	from := netip.MustParseAddrPort("10.0.0.2:40001")
	var b strings.Builder
	writeMessage(&b, datatypes.Message{Source: from, Number: 7, Bytes: 1 << 20, Verified: true, File: "dir/x"})
	writeMessage(&b, datatypes.Message{Source: from, Number: 8, Bytes: 5})
	writeMessage(&b, datatypes.Message{Source: from, Number: 9, Err: "message 9: too long"})
	writeRequest(&b, datatypes.Request{From: from, Messages: 16, Elements: 1})
	writeRequest(&b, datatypes.Request{Err: errors.New("no answer")})
	want := `message 7 from 10.0.0.2:40001: 1 MiB, all bytes where they must be, dir/x
message 8 from 10.0.0.2:40001: 5 B
refused: from 10.0.0.2:40001: message 9: too long
10.0.0.2:40001 asks for 16 messages of 1 element
failed: no answer
`
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}
