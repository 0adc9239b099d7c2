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
}

// A Factory makes a set for a context.
type Factory func(Params) (*Set, error)

// A Registration is a set that was registered.
type Registration struct {
	Name string
	Help string // one line
	New  Factory
}

var (
	mu   sync.Mutex
	sets = map[string]Registration{}
)

// Register names a set. It is for init functions: a name that is taken panics.
func Register(name, help string, f Factory) {
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
