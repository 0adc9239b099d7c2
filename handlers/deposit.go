// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("deposit", "puts SLMP messages into the window, and tells the application when one ends", newDeposit)
}

func newDeposit(p Params) (*Set, error) {
	if err := p.Decode(&struct{}{}); err != nil {
		return nil, err
	}
	return &Set{
		Handlers: hpu.Handlers{Header: deposit},
		Rulesets: []matcher.Ruleset{matcher.SLMP()},
		Queue:    true,
		Window:   true,
	}, nil
}

// deposit leaves a message's payload to the NIC, which puts it where the message's
// receive says, or at the window's start, and tells the application of its end. A message
// that is too long for its place fails at the first byte beyond it.
func deposit(*hpu.HER) spin.Code { return spin.Proceed }
