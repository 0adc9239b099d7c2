// SPDX-License-Identifier: Apache-2.0

package ddt

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// An App is a datatype that an application uses: those of SC 2019, figure 16, and the two
// of FPsPIN's evaluation.
//
// Displacement 0 is where the application's call to MPI_Recv points, which may be in the
// middle of an array; where that is MPI_BOTTOM, the first of its arrays. None of them
// reaches before it.
type App struct {
	Name string // COMB, FFT2D, ..., Simple, Complex
	// Help is one line: what moves, and what the defaults make of it. The last number
	// is how many blocks packets of 1408 bytes have on average, with those that are
	// cut.
	Help   string
	Origin string // of the shape: program, routine, input
	Params []Param
	// Make builds the type. Parameters that are not in the map have their defaults,
	// and errors name the parameter.
	Make func(params map[string]int64) (t *Type, count int64, err error)
}

// A Param is a number that gives an App its shape.
type Param struct {
	Name     string
	Help     string
	Default  int64
	Min, Max int64
}

// Apps returns all of them, those of SC 2019 first.
func Apps() []App { return slices.Clone(apps) }

// numbers are parameters that have been checked.
type numbers map[string]int64

// newApp returns an App whose Make fills in defaults and checks ranges before it builds.
func newApp(name, help, origin string, params []Param, build func(numbers) (*Type, error)) App {
	return App{
		Name: name, Help: help, Origin: origin, Params: params,
		Make: func(given map[string]int64) (*Type, int64, error) {
			all := numbers{}
			for _, p := range params {
				all[p.Name] = p.Default
			}
			for _, key := range slices.Sorted(maps.Keys(given)) {
				i := slices.IndexFunc(params, func(p Param) bool { return p.Name == key })
				if i < 0 {
					return nil, 0, unknownParam(name, key, params)
				}
				n, p := given[key], params[i]
				if n < p.Min || n > p.Max {
					return nil, 0, fmt.Errorf("%s: %s=%d: want %d to %d (%s)", name, key, n, p.Min, p.Max, p.Help)
				}
				all[key] = n
			}
			t, err := build(all)
			if err != nil {
				return nil, 0, fmt.Errorf("%s: %w", name, err)
			}
			return t, 1, nil
		},
	}
}

func unknownParam(app, key string, params []Param) error {
	if len(params) == 0 {
		return fmt.Errorf("%s: no parameter %q: it has none", app, key)
	}
	return fmt.Errorf("%s: no parameter %q: it has %s", app, key, paramNames(params))
}

func paramNames(params []Param) string {
	var names []string
	for _, p := range params {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

func appNames() string {
	var names []string
	for _, a := range apps {
		names = append(names, a.Name)
	}
	return strings.Join(names, ", ")
}

// Resolve returns what a text names: an App, as NAME or NAME(param=number ...), with its
// count; or a type as Parse reads it, with count 1. Names are the same in upper and lower
// case, and a comma is as good as a space between parameters. So complex is the App;
// Fortran's type is dup[complex].
func Resolve(text string) (t *Type, count int64, err error) {
	p := parser{text: text}
	p.skip()
	at := p.pos
	name := p.word()
	if i := slices.IndexFunc(apps, func(a App) bool { return strings.EqualFold(a.Name, name) }); i >= 0 {
		p.in = apps[i].Name
		args := p.params()
		if p.err != nil {
			return nil, 0, p.err
		}
		params, err := parseParams(apps[i], args)
		if err != nil {
			return nil, 0, err
		}
		return apps[i].Make(params)
	}
	if t, err = Parse(text); err == nil {
		return t, 1, nil
	}
	// Parse knows nothing of applications, so what it says of an unknown word is half
	// of it.
	_, known := Lookup(name)
	if name == "" || known || isConstructor(name) || isDigit(name[0]) || len(text) > MaxText {
		return nil, 0, err
	}
	if what := hint(name); what != "" {
		p.fail(at, fmt.Errorf("%q is neither a type nor an application's datatype: %s", name, what))
	} else {
		p.fail(at, fmt.Errorf("%q is neither a type nor an application's datatype: these are %s", name, appNames()))
	}
	return nil, 0, p.err
}

// params reads the parameters of an App to the end of the text, and returns what is in
// the parentheses.
func (p *parser) params() (args string) {
	if p.take('(') {
		n := strings.IndexByte(p.text[p.pos:], ')')
		if n < 0 {
			p.pos = len(p.text)
			p.want(`")" after its parameters`)
			return ""
		}
		args = p.text[p.pos : p.pos+n]
		p.pos += n + 1
		if p.skip(); p.pos < len(p.text) {
			p.want("the end: it is no part of other types")
		}
		return args
	}
	if p.skip(); p.pos < len(p.text) {
		p.want(`"(" and parameters, or the end`)
	}
	return ""
}

// parseParams reads param=number, separated by spaces or commas.
func parseParams(a App, args string) (map[string]int64, error) {
	params := map[string]int64{}
	for _, arg := range strings.FieldsFunc(args, func(c rune) bool { return c == ',' || c == ' ' || c == '\t' || c == '\n' }) {
		key, number, found := strings.Cut(arg, "=")
		key = strings.ToLower(key)
		i := slices.IndexFunc(a.Params, func(p Param) bool { return p.Name == key })
		switch {
		case !found || key == "" || number == "":
			return nil, fmt.Errorf("%s: %q: want parameter=number, without spaces", a.Name, arg)
		case i < 0:
			return nil, unknownParam(a.Name, key, a.Params)
		}
		if _, twice := params[key]; twice {
			return nil, fmt.Errorf("%s: %s is given twice", a.Name, key)
		}
		n, err := strconv.ParseInt(number, 10, 64)
		switch p := a.Params[i]; {
		case errors.Is(err, strconv.ErrRange):
			return nil, fmt.Errorf("%s: %s=%s: want %d to %d (%s)", a.Name, key, number, p.Min, p.Max, p.Help)
		case err != nil:
			return nil, fmt.Errorf("%s: %s=%q: want a whole number, %d to %d (%s)", a.Name, key, number, p.Min, p.Max, p.Help)
		}
		params[key] = n
	}
	return params, nil
}
