// SPDX-License-Identifier: Apache-2.0

// Package handlers names sets of handlers, so that a configuration file can. A
// package with handlers of its own registers them in an init function:
//
//	func init() {
//		handlers.Register("reverse", "sends each datagram back, reversed", newReverse)
//	}
//
// and is compiled in by a main package that imports it beside cli, see docs/handlers.md.
package handlers

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/xspin/xspin/ddt"
	"github.com/xspin/xspin/hpu"
	"github.com/xspin/xspin/matcher"
)

// A Set is the handlers of an application, and what they need.
type Set struct {
	hpu.Handlers
	Rulesets  []matcher.Ruleset // that bring packets, if the configuration names none
	Triggered bool              // the host activates them, never packets: there can be no rulesets
	State     int               // bytes of each message
	Initial   []byte            // what they begin with
	Memory    int               // least bytes of HPU memory of the context
	HPUMemory int               // least bytes of each HPU
	Queue     bool              // they ask the application: activate is attach, if the configuration does not say
	Window    bool              // messages go to the context's first window: there must be one
	Timestamp bool              // packets carry their time of arrival
	Timer     time.Duration     // between calls of Timer, if the configuration does not say

	// Sequence: of a message's packets, those that begin in the same so many bytes must
	// be handled one after the other, and so must all that go to the same of VHPUs
	// virtual HPUs. The policy is then blocked-rr with these numbers, or message. 0:
	// it does not matter.
	Sequence uint32
	VHPUs    int

	// Reserved are bytes of memory that the handlers have allocated, by what for. They
	// count as the context's HPU memory does.
	Reserved map[string]int64
}

// ReservedBytes returns the sum of Reserved.
func (s *Set) ReservedBytes() (sum int64) {
	for _, n := range s.Reserved {
		sum += n
	}
	return sum
}

// A Factory makes a set for a context.
type Factory func(Params) (*Set, error)

// ErrMemory is wrapped by errors of sets that would take more memory than they may.
var ErrMemory = ddt.ErrMemory

// An Env is what is known of a context for which a set is to be made. Zero fields are not
// known.
type Env struct {
	HPUs     int   // of the NIC, 0..HPUs-1
	Messages int   // that can be in flight; their slots are 0..Messages-1
	Window   int64 // bytes of the largest of its windows that handlers may write; -1: there is none
	Memory   int64 // bytes of the NIC's that the set may take, as Reserved has them, or else ErrMemory; -1: none
}

// An EnvFactory is a Factory of a set that depends on the context.
type EnvFactory func(Params, Env) (*Set, error)

// A Registration is a set that was registered.
type Registration struct {
	Name string
	Help string // one line
	New  EnvFactory
}

var (
	mu   sync.Mutex
	sets = map[string]Registration{}
)

// Register names a set. It is for init functions: a name that is taken panics.
func Register(name, help string, f Factory) {
	var g EnvFactory
	if f != nil {
		g = func(p Params, _ Env) (*Set, error) { return f(p) }
	}
	RegisterEnv(name, help, g)
}

// RegisterEnv is Register for a set that depends on its context.
func RegisterEnv(name, help string, f EnvFactory) {
	mu.Lock()
	defer mu.Unlock()
	if _, taken := sets[name]; taken || name == "" || f == nil {
		panic(fmt.Sprintf("handlers: Register(%q): no name, no factory, or registered twice", name))
	}
	sets[name] = Registration{name, help, f}
}

// Lookup returns the set of a name.
func Lookup(name string) (Registration, bool) {
	mu.Lock()
	defer mu.Unlock()
	r, ok := sets[name]
	return r, ok
}

// All returns all sets, by name.
func All() []Registration {
	mu.Lock()
	defer mu.Unlock()
	var all []Registration
	for _, r := range sets {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b Registration) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
