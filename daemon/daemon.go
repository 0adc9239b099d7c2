// SPDX-License-Identifier: Apache-2.0

// Package daemon owns NICs, and lets unprivileged applications attach to their
// execution contexts.
package daemon

import (
	"context"
	"log/slog"

	"github.com/xspin/xspin/control"
)

// Config of a daemon, as its file has it.
type Config struct {
	Socket     string            `json:"socket,omitempty"`  // defaults to control.Socket
	Metrics    string            `json:"metrics,omitempty"` // TCP address for Prometheus; none if left out
	Admins     control.Attach    `json:"admins,omitempty"`  // who may do what root may
	Limits     Limits            `json:"limits,omitempty"`
	Log        Log               `json:"log,omitempty"`
	Interfaces []Interface       `json:"interfaces"`
	Windows    []control.Window  `json:"windows,omitempty"` // that several contexts may use
	Contexts   []control.Context `json:"contexts,omitempty"`
}

// Interface is a NIC.
type Interface struct {
	Name    string           `json:"name"`
	Netns   string           `json:"netns,omitempty"` // name of a network namespace, as ip netns has them
	Mode    string           `json:"mode,omitempty"`  // auto, native, generic
	HPUs    int              `json:"hpus,omitempty"`
	Workers int              `json:"workers,omitempty"`
	CPUs    []int            `json:"cpus,omitempty"`
	Wait    string           `json:"wait,omitempty"`
	Ring    int              `json:"ring,omitempty"`
	Limit   control.Duration `json:"limit,omitempty"` // of handlers
}

// Limits bound what contexts may ask for.
type Limits struct {
	Window control.Size `json:"window,omitempty"` // one window; 4GiB if left out
	Memory control.Size `json:"memory,omitempty"` // all of them and HPU memory; 8GiB if left out
}

// Log says what is done with what handlers print.
type Log struct {
	Lines int    `json:"lines,omitempty"` // kept for each HPU of a context
	Rate  int    `json:"rate,omitempty"`  // lines a second and HPU that are kept for sure
	Dir   string `json:"dir,omitempty"`   // also into files there
}

// Load reads a configuration file and checks all that can be checked without a NIC.
// Errors name file, line and column where there are.
func Load(file string) (*Config, error) { panic("not yet") }

// A Daemon is a running one.
type Daemon struct{}

// Options of Start.
type Options struct {
	File    string // that Reload reads; Optional
	Version string
	Logger  *slog.Logger
	// KeepPrivileges: do not drop capabilities, as tests and demos want that go
	// on in the same process.
	KeepPrivileges bool
}

// Start opens the NICs, installs the contexts and listens.
func Start(cfg *Config, o Options) (*Daemon, error) { panic("not yet") }

// Reload reads the file again and does what has changed: all of it, or nothing.
func (d *Daemon) Reload() (changes []string, err error) { panic("not yet") }

// Socket returns where it listens.
func (d *Daemon) Socket() string { panic("not yet") }

// Close detaches applications, drains contexts and closes the NICs.
func (d *Daemon) Close(ctx context.Context) error { panic("not yet") }
