// SPDX-License-Identifier: Apache-2.0

package nic

import (
	"errors"
	"fmt"

	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
)

// Workers returns how many threads serve the HPUs.
func (n *NIC) Workers() int { return n.cfg.Workers }

// HPUs returns how many HPUs the NIC has.
func (n *NIC) HPUs() int { return n.cfg.HPUs }

// ErrInactive says that a context is not activated.
var ErrInactive = errors.New("context is not active")

// hostFormat is the message format of host-activated contexts. It describes no
// frames: messages have a number, and end.
func hostFormat() *matcher.Format {
	eom := matcher.Empty
	return &matcher.Format{Name: "host", Key: []matcher.Field{{Mask: 0xffffffff}}, EOM: &eom}
}

// Trigger has the handlers of a host-activated context run for a message of the
// host's, see [hpu.Trigger].
func (n *NIC) Trigger(c *Context, t hpu.Trigger) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("trigger context %q on %s: %w", c.spec.Name, n.iface.Name, err)
		}
	}()
	tier, ok := c.tier.(triggerable)
	if !ok || !c.spec.HostActivated {
		return errors.New("it is not host-activated: its messages come from packets")
	}
	err = n.enter(c, func() error {
		if !c.active {
			return ErrInactive
		}
		return nil
	})
	if err != nil {
		return err
	}
	defer n.ops.Done()
	return tier.trigger(t)
}
