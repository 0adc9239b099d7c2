// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/xspin/xspin/control"
)

// A ContextFile is a file with one entry of a configuration's list of contexts, for a
// program that sends it to a daemon.
type ContextFile struct {
	Context control.Context
	doc     *document
}

// ParseContext reads such a file as Load reads a configuration: errors have their
// places, unknown keys are errors. An object is read, from a path relative to the file's
// directory. What depends on the daemon (its interfaces, windows,
// handlers and limits) that daemon checks, see Locate.
func ParseContext(file string, text []byte) (*ContextFile, error) {
	f := &ContextFile{}
	f.doc = parseYAML(file, text, &f.Context)
	if f.doc.hasKey("contexts") || f.doc.hasKey("interfaces") {
		return nil, fmt.Errorf("%s: this is a daemon's configuration, not a context's: want one entry of its contexts, such as {name: ping, handler: echo-icmp}; the daemon that has the file reads it again with xspin ctx reload", file)
	}
	if f.doc.at[""] == nil && !f.doc.broken {
		return nil, fmt.Errorf("%s is empty: want a context, such as {name: ping, handler: echo-icmp}", file)
	}
	if err := f.doc.err(); err != nil {
		return nil, err
	}
	if err := readObject(&f.Context, filepath.Dir(file)); err != nil {
		f.doc.place(problem{path: "object", msg: err.Error()})
		return nil, f.doc.err()
	}
	return f, nil
}

// ParseFlag reads the value of a flag, which has keys of a configuration, as Load reads these: it may be without the
// braces of YAML. Errors name the flag.
func ParseFlag(flag, text string, into any) error {
	keys := text
	if strings.TrimSpace(text) == "" {
		return fmt.Errorf("--%s %q: want keys with values", flag, text)
	}
	if !strings.HasPrefix(strings.TrimSpace(text), "{") {
		keys = "{" + text + "}"
	}
	doc := parseYAML(fmt.Sprintf("--%s %q", flag, text), []byte(keys), into)
	for i := range doc.problems {
		doc.problems[i].line = 0 // there is but one
	}
	return doc.err()
}

// Locate says where in the file the problems are of which an error of the daemon tells.
// Other errors it returns as they are.
func (f *ContextFile) Locate(err error) error {
	var e *control.Error
	if !errors.As(err, &e) || e.Problems == nil {
		return err
	}
	doc := *f.doc
	doc.problems = nil
	for _, p := range e.Problems {
		doc.place(problem{path: p.Path, line: p.Line, column: p.Column, msg: p.Text})
	}
	if located := doc.err(); located != nil {
		return located
	}
	return err
}
