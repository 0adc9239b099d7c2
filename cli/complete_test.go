// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/xspin/xspin/daemon"
	"github.com/xspin/xspin/eval"
)

// complete returns the words that a shell is offered for the last one of a command line,
// and what else it is told to do.
func complete(t *testing.T, line ...string) (words []string, directive cobra.ShellCompDirective) {
	t.Helper()
	root := newRootCmd(eval.Commands()...)
	var out, errs bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&errs)
	root.SetArgs(append([]string{cobra.ShellCompNoDescRequestCmd}, line...))
	if err := root.Execute(); err != nil {
		t.Fatalf("complete %q: %v", line, err)
	}
	if s := errs.String(); strings.Count(s, "\n") > 1 { // one is cobra's, of the directive
		t.Errorf("complete %q writes to the terminal: %q", line, s)
	}
	all := strings.Split(strings.TrimSpace(out.String()), "\n")
	if _, err := fmt.Sscanf(all[len(all)-1], ":%d", &directive); err != nil {
		t.Fatalf("complete %q: no directive at the end of %q: %v", line, out.String(), err)
	}
	return all[:len(all)-1], directive
}

func TestCompletion(t *testing.T) {
	s := newStandIn(t)
	t.Setenv("XSPIN_SOCKET", s.socket+".none")
	const (
		files   = cobra.ShellCompDirectiveDefault
		nothing = cobra.ShellCompDirectiveNoFileComp // but the words
		dirs    = cobra.ShellCompDirectiveFilterDirs
	)
	for _, tt := range []struct {
		line      string // S is the socket, the word to complete is after the last space
		want      string
		directive cobra.ShellCompDirective
	}{
		{"ctx show --socket S ", "inbox", nothing},
		{"ctx show --socket S inbox ", "", nothing},
		{"ctx activate --socket S ", "inbox", nothing},
		{"ctx deactivate --socket S ", "inbox", nothing},
		{"ctx rm --socket S ", "inbox", nothing},
		{"ctx rm --socket S other ", "inbox", nothing},
		{"ctx rm --socket S inbox ", "", nothing},
		{"ctx trigger --socket S ", "inbox", nothing},
		{"ctx install --socket S ", "", files},
		{"ctx install a.yaml ", "", nothing},
		{"log --socket S ", "inbox", nothing},
		{"log --socket S.none ", "", nothing},
		{"capture --socket S ", "inbox", nothing},
		{"capture inbox -w ", "", files},
		{"capture inbox --filter ", "", files},
		{"capture inbox --snap ", "", nothing},
		{"capture inbox --verdict ", strings.Join(daemon.Verdicts(), " "), nothing},
		{"mem --socket S ", "inbox", nothing},
		{"mem ", "read write", nothing},
		{"mem read --socket S ", "inbox", nothing},
		{"mem write --socket S ", "inbox", nothing},
		{"demo inbox --socket S ", "inbox", nothing},
		{"demo inbox --dir ", "", dirs},
		{"stats --socket S ", "eth1 eth2", nothing},
		{"stats --socket ", "", files},
		{"demo pingpong --proto ", "icmp udp both", nothing},
		{"demo pingpong --mode ", "host nic host+nic", nothing},
		{"demo pingpong --mode host,", "host,nic host,host+nic", nothing},
		{"demo pingpong --wait ", "adaptive sleep spin", nothing},
		{"demo pingpong --client-wait ", "block spin", nothing},
		{"demo pingpong --count ", "", nothing},
		{"demo pingpong ", "", nothing},
		{"demo file --into ", "file window", nothing},
		{"demo datatypes --strategy ", "direct specialized hpu-local ro-cp rw-cp deposit", nothing},
		{"demo datatypes --type ", strings.Join(typeNames(), " "), files},
		{"send --mode ", "every first-last none", nothing},
		{"send ", "", files},
		{"bench hostq --only ", "polling sleeping notify pingpong window", nothing},
		{"bench hostq --only window,notify,", "window,notify,polling window,notify,sleeping window,notify,pingpong", nothing},
		{"lab exec ", "nic host path", nothing},
		{"lab exec nic ", "", files},
		{"ddt ls ", strings.Join(typeNames(), " "), nothing},
		{"ddt describe ", strings.Join(typeNames(), " "), files},
		{"ddt pack --in a --out b ", strings.Join(typeNames(), " "), files},
		{"ddt pack int --in ", "", files},
		{"ddt unpack --in a --out b ", strings.Join(typeNames(), " "), files},
		{"rules check one ", "", files},
		{"rules explain ", "", files},
		{"rules explain my.rules ", "", nothing},
		{"rules test --engine ", "reference kernel auto", nothing},
		{"rules test --pcap x ", "", files},
		{"run ", "", files},
		{"--config ", "", files},
	} {
		line := strings.Split(tt.line, " ")
		for i, word := range line {
			if name, ok := strings.CutPrefix(word, "S"); ok && (name == "" || name == ".none") {
				line[i] = s.socket + name
			}
		}
		words, directive := complete(t, line...)
		if got := strings.Join(words, " "); got != tt.want || directive != tt.directive {
			t.Errorf("%s<TAB>: %q and directive %d, want %q and %d", tt.line, got, directive, tt.want, tt.directive)
		}
	}
}

// Where the daemon is, the environment says too.
func TestCompletionAsksTheSocketOfTheEnvironment(t *testing.T) {
	s := newStandIn(t)
	t.Setenv("XSPIN_SOCKET", s.socket+".none")
	if words, _ := complete(t, "log", ""); len(words) > 0 {
		t.Errorf("without a daemon: %q", words)
	}
	t.Setenv("XSPIN_LOG_SOCKET", s.socket)
	if words, _ := complete(t, "log", ""); !slices.Equal(words, []string{"inbox"}) {
		t.Errorf("XSPIN_LOG_SOCKET: %q, want inbox", words)
	}
	t.Setenv("XSPIN_LOG_SOCKET", "")
	t.Setenv("XSPIN_SOCKET", s.socket)
	if words, _ := complete(t, "log", ""); !slices.Equal(words, []string{"inbox"}) {
		t.Errorf("XSPIN_SOCKET: %q, want inbox", words)
	}
}
