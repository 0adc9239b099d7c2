// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/spin"
)

func init() {
	Register("deposit", "puts SLMP messages into the window, and tells the application of each", newDeposit)
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
// receive says, or at the window's begin. Its end is an event of the application's. A
// message that is too long for its place fails when its first byte beyond that comes.
func deposit(*hpu.HER) spin.Code { return spin.Proceed }
