// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/viper"

	"github.com/xspin/xspin/control"
	"github.com/xspin/xspin/internal/regular"
)

// Config of a daemon, as its file has it.
type Config struct {
	Socket     string            `json:"socket,omitempty"`  // defaults to control.Socket
	Metrics    string            `json:"metrics,omitempty"` // TCP address for Prometheus; none if left out
	User       string            `json:"user,omitempty"`    // that the daemon becomes when it has started; stays who it is if left out
	Admins     control.Attach    `json:"admins,omitempty"`  // who may do what root may
	Limits     Limits            `json:"limits,omitempty"`
	Log        Log               `json:"log,omitempty"`
	Kernel     string            `json:"kernel,omitempty"` // who may have handlers in eBPF: administrators, or off (default)
	Interfaces []Interface       `json:"interfaces"`
	Windows    []control.Window  `json:"windows,omitempty"` // that several contexts may use
	Contexts   []control.Context `json:"contexts,omitempty"`
}

// Interface is a NIC.
type Interface struct {
	Name    string           `json:"name"`
	Netns   string           `json:"netns,omitempty"` // name of a network namespace, as ip netns has them
	Mode    string           `json:"mode,omitempty"`  // auto, native, generic
	Hook    string           `json:"hook,omitempty"`  // of handlers in eBPF: auto, xdp, tc
	Order   string           `json:"order,omitempty"` // at tc, among the programs of others: last, first
	HPUs    int              `json:"hpus,omitempty"`
	Workers int              `json:"workers,omitempty"`
	CPUs    []int            `json:"cpus,omitempty"`
	Wait    string           `json:"wait,omitempty"` // adaptive, spin, sleep
	Ring    int              `json:"ring,omitempty"`
	Limit   control.Duration `json:"limit,omitempty"` // of handlers
}

// key is what contexts name an interface by, if the name alone will not do.
func (i *Interface) key() string {
	if i.Netns == "" {
		return i.Name
	}
	return i.Netns + "/" + i.Name
}

// Limits bound what contexts may ask for.
type Limits struct {
	Window control.Size `json:"window,omitempty"` // one window; 4GiB if left out
	Memory control.Size `json:"memory,omitempty"` // all windows, queues and HPU memory, and what handlers hold; 8GiB if left out
}

// Defaults of Limits.
const (
	DefaultWindowLimit = control.Size(4 << 30)
	DefaultMemoryLimit = control.Size(8 << 30)
)

func (l Limits) complete() Limits {
	return Limits{cmp.Or(l.Window, DefaultWindowLimit), cmp.Or(l.Memory, DefaultMemoryLimit)}
}

// Log says what is done with what handlers print.
type Log struct {
	Lines int    `json:"lines,omitempty"` // kept for each HPU of a context
	Rate  int    `json:"rate,omitempty"`  // lines a second and HPU that are kept for sure
	Dir   string `json:"dir,omitempty"`   // also into files there
}

// environment begins the names of variables that override scalars of the file:
// XSPIN_RUN_LIMITS_MEMORY is limits.memory.
const environment = "XSPIN_RUN"

// overridable are the scalars that the environment may override.
var overridable = []string{
	"socket", "metrics", "user", "limits.window", "limits.memory", "log.lines", "log.rate", "log.dir",
}

// maxConfig is more than anybody writes by hand.
const maxConfig = 4 << 20

// Load reads a configuration file and checks all that can be checked without a NIC.
// Errors name file, line and column where there are; all of them are told.
// Variables such as XSPIN_RUN_SOCKET, XSPIN_RUN_LIMITS_MEMORY override the file.
func Load(file string) (*Config, error) {
	text, err := regular.Read(file, maxConfig)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	cfg := &Config{}
	doc := parseYAML(file, text, cfg)
	if doc.broken {
		return nil, doc.err()
	}
	doc.override(cfg)
	var c checker
	for i := range cfg.Contexts {
		if err := readObject(&cfg.Contexts[i], filepath.Dir(file)); err != nil {
			c.fail(fmt.Sprintf("contexts[%d].object", i), "%v", err)
		}
	}
	checkConfig(&c, cfg)
	for _, p := range c.problems {
		doc.place(p)
	}
	if err := doc.err(); err != nil {
		return nil, err
	}
	return cfg, nil
}

// override lets the environment have its way.
func (d *document) override(cfg *Config) {
	v := viper.New()
	v.SetEnvPrefix(environment)
	v.SetEnvKeyReplacer(strings.NewReplacer(".", "_"))
	for _, key := range overridable {
		_ = v.BindEnv(key) // fails for an empty key only
		if !v.IsSet(key) {
			continue
		}
		name := environment + "_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
		d.names[key] = "environment " + name
		if err := setText(fieldOf(cfg, key), v.GetString(key)); err != nil {
			d.problems = append(d.problems, located{source: d.names[key], msg: err.Error()})
		}
	}
}

// A problem is something wrong with a configuration.
type problem struct {
	path string // such as contexts[0].windows[1].size
	// Within the text at path, from 1: 0 if the path says it all.
	line, column int
	msg          string
}

func (p problem) Error() string {
	switch {
	case p.path == "":
		return p.msg
	case p.line > 0:
		return fmt.Sprintf("%s:%d:%d: %s", p.path, p.line, p.column, p.msg)
	}
	return p.path + ": " + p.msg
}

// A located problem is one with a place in the file, or wherever it comes from.
type located struct {
	source       string
	line, column int // 0: unknown
	msg          string
}

func (l located) Error() string {
	if l.line == 0 {
		return fmt.Sprintf("%s: %s", l.source, l.msg)
	}
	return fmt.Sprintf("%s:%d:%d: %s", l.source, l.line, l.column, l.msg)
}

// err returns all problems, in the order of the file.
func (d *document) err() error {
	slices.SortStableFunc(d.problems, func(a, b located) int {
		return cmp.Or(cmp.Compare(a.line, b.line), cmp.Compare(a.column, b.column))
	})
	var errs []error
	for _, p := range slices.Compact(d.problems) {
		errs = append(errs, p)
	}
	return errors.Join(errs...)
}
