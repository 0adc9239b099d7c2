// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"net"
	"testing"

	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/netns/netnstest"
)

// A driver tells whether it has XDP, with nothing attached.
func TestDriverMode(t *testing.T) {
	lab := netnstest.Temp(t, netns.LabConfig{})
	inside(t, lab.NIC, func(veth *net.Interface) {
		for name, want := range map[string]Mode{veth.Name: Native, "lo": Generic} {
			i, err := net.InterfaceByName(name)
			must(t, err)
			if got, err := DriverMode(i); got != want || err != nil {
				t.Errorf("%s: %v, error %v, want %v", name, got, err, want)
			}
			if id, _ := attached(t, i); id != 0 {
				t.Errorf("%s: program %d is attached", name, id)
			}
		}
		if got, err := DriverMode(&net.Interface{Index: 1 << 20, Name: "gone"}); err == nil {
			t.Errorf("an interface that is not there: %v", got)
		}
	})
}
