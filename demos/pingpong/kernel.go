// SPDX-License-Identifier: Apache-2.0

package pingpong

import (
	"errors"
	"io"

	"github.com/xspin/xspin/demos/pingpong/rtt"
	"github.com/xspin/xspin/netns"
	"github.com/xspin/xspin/nic"
)

// inKernel is a NIC whose handlers, in eBPF, answer.
type inKernel struct {
	*nic.NIC
	wire io.Closer // nil at tc
}

func startKernel(lab *netns.Lab, c ServerConfig) (_ NICServer, err error) {
	s, hook := &inKernel{}, nic.HookTC
	if c.Mode == XDP {
		hook = nic.HookXDP
		if s.wire, err = lab.Host.Wire(); err != nil { // or the answers arrive nowhere
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	err = lab.NIC.NS.Do(func() (err error) {
		s.NIC, err = nic.Open(nic.Config{Interface: lab.NIC.Device, Hook: hook, HPUs: c.HPUs, CPUs: c.CPUs})
		return err
	})
	if err != nil {
		return nil, err
	}
	err = echo(s.NIC, c, func(p rtt.Proto, spec *nic.ContextSpec) error {
		object, err := nic.BuiltinObject("echo-" + string(p))
		spec.Kernel = &nic.Kernel{Object: object}
		return err
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Breakdown implements NICServer: nothing is timed on its own.
func (s *inKernel) Breakdown(rtt.Proto, int) Breakdown { return Breakdown{} }

func (s *inKernel) Close() error {
	var err error
	if s.NIC != nil {
		err = s.NIC.Close()
	}
	if s.wire != nil {
		err = errors.Join(err, s.wire.Close())
	}
	return err
}
