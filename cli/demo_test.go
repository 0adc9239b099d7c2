// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/netns/netnstest"
)

// parseFlags parses a line with the flags that bind adds.
func parseFlags(bind func(*pflag.FlagSet), line string) (*pflag.FlagSet, error) {
	fl := pflag.NewFlagSet("demo", pflag.ContinueOnError)
	bind(fl)
	return fl, fl.Parse(strings.Fields(line))
}

// A flagCase is a line that is taken, and one next to it that is not.
type flagCase struct{ good, bad, says string }

func checkFlags[C any](t *testing.T, parse func(line string) (C, error), cases []flagCase) {
	t.Helper()
	for _, tc := range cases {
		if _, err := parse(tc.good); err != nil {
			t.Errorf("%s: %v", tc.good, err)
		}
		if _, err := parse(tc.bad); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: error %v, want %q", tc.bad, err, tc.says)
		}
	}
}

// refusedFirst sees a wrong flag found before anything is set up: without a lab and
// perhaps without root.
func refusedFirst(t *testing.T, cmd *cobra.Command, says string, args ...string) {
	t.Helper()
	cmd.SetArgs(args)
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("error %v, want %q", err, says)
	}
}

func TestDemosUseTheLabThatIsUp(t *testing.T) {
	netnstest.NeedRoot(t)
	cfg := netnstest.Unique(netns.LabConfig{})
	ends := func() (up int) {
		for _, name := range []string{cfg.NIC.Namespace, cfg.Host.Namespace} {
			if ns, err := netns.OpenNamespace(name); err == nil {
				up++
				ns.Close()
			}
		}
		return up
	}
	borrow := func() {
		t.Helper()
		lab, down, err := borrowLab(cfg)
		if err != nil || lab == nil || ends() != 2 {
			t.Fatalf("error %v, %d ends", err, ends())
		}
		if err := down(); err != nil {
			t.Error(err)
		}
	}
	borrow()
	if n := ends(); n != 0 {
		t.Errorf("%d ends are left of a lab that was not there before", n)
	}

	bad := cfg
	bad.Path = &impair.Config{Delay: time.Millisecond}
	lab, err := netns.Up(bad)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Down(bad); err != nil {
			t.Error(err)
		}
	})
	borrow()
	if n := ends(); n != 2 {
		t.Errorf("%d ends are left of a lab that was there before", n)
	}
	if err := lab.Close(); err != nil { // with the relay, which is ours
		t.Fatal(err)
	}
	if _, _, err := borrowLab(cfg); !errors.Is(err, impair.ErrNoRelay) || !strings.Contains(err.Error(), "xspin lab up") {
		t.Errorf("error %v of a lab without its relay, want ErrNoRelay and the way out", err)
	}
}
