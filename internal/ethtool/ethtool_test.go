// SPDX-License-Identifier: Apache-2.0

package ethtool_test

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xspin/xspin/internal/ethtool"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

func TestFeatures(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{Queues: 3})
	device := lab.Host.Device
	must := func(f ethtool.Feature, want bool) {
		t.Helper()
		if on, err := f.Enabled(device); err != nil || on != want {
			t.Errorf("%v: %v, %v; want %v", f, on, err, want)
		}
	}
	err := lab.Host.NS.Do(func() error {
		for _, f := range []ethtool.Feature{ethtool.TSO, ethtool.GSO, ethtool.TxChecksum, ethtool.GRO, ethtool.UDPSegment} {
			for _, on := range []bool{true, false, true} {
				if err := f.Enable(device, on); err != nil {
					t.Error(err)
				}
				must(f, on)
			}
		}
		if err := ethtool.TxChecksum.Enable(device, false); err != nil {
			t.Error(err)
		}
		must(ethtool.TSO, false) // the kernel's rule: it needs the other
		must(ethtool.GSO, true)

		if n, err := ethtool.RxQueues(device); err != nil || n != 3 {
			t.Errorf("%d queues, %v; want 3", n, err)
		}
		if n, err := ethtool.RxQueues("lo"); err != nil || n != 0 {
			t.Errorf("%d queues, %v; the driver of lo does not tell", n, err)
		}
		if err := ethtool.TxChecksum.Enable("lo", false); err == nil || !strings.Contains(err.Error(), "turn tx-checksumming of lo off: ") {
			t.Errorf("what lo has fixed was turned off: %v", err)
		}

		const long = "a-name-of-16-byt"
		for name, want := range map[string]string{"gone": unix.ENODEV.Error(), long: "longer than 15 bytes"} {
			_, err := ethtool.TSO.Enabled(name)
			_, err2 := ethtool.RxQueues(name)
			for _, err := range []error{err, err2, ethtool.TSO.Enable(name, true)} {
				if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), want) {
					t.Errorf("%v; want %q and %q", err, name, want)
				}
			}
		}
		if _, err := ethtool.RxQueues("gone"); !errors.Is(err, unix.ENODEV) {
			t.Error(err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
