// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/xspin/xspin/spin"
)

// A Parameter is a global `const volatile` variable of an object. A context sets it before
// its handlers run, and it is a constant while they do.
type Parameter struct {
	Name    string `json:"name"`
	Want    string `json:"want"`    // what it takes, in words
	Default string `json:"default"` // what it is if nobody sets it

	kind paramKind
}

// A paramKind reads the values of a parameter.
type paramKind struct {
	size    int
	signed  bool
	boolean bool
	text    bool // an array of char, of size
	names   []btf.EnumValue
}

// parameters finds those of an object.
func parameters(spec *ebpf.CollectionSpec) (all []Parameter, err error) {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(spec.Variables)) {
		v := spec.Variables[name]
		if !v.Constant() || v.Type == nil || !isVolatile(v.Type.Type) || strings.HasPrefix(name, reserved) {
			continue
		}
		k, ok := kindOf(v.Type.Type)
		if !ok || k.size != len(v.Value) {
			errs = append(errs, fmt.Errorf("const volatile %s: a parameter is a number, a bool, an enum or an array of char", name))
			continue
		}
		if len(k.names) > mostValues {
			errs = append(errs, fmt.Errorf("const volatile %s: it has %d values: want at most %d", name, len(k.names), mostValues))
			continue
		}
		if len(all) == mostParams {
			return nil, fmt.Errorf("it has more than %d parameters", mostParams)
		}
		all = append(all, Parameter{name, k.want(), k.show(v.Value), k})
	}
	return all, errors.Join(errs...)
}

// isVolatile tells whether clang may not know the variable's value. A type may be made of
// itself, in an object that clang has not made: nobody is asked more often than a sane type takes.
func isVolatile(t btf.Type) bool {
	for range 64 {
		switch u := t.(type) {
		case *btf.Volatile:
			return true
		case *btf.Const:
			t = u.Type
		case *btf.Typedef:
			t = u.Type
		case *btf.Array:
			t = u.Type
		default:
			return false
		}
	}
	return false
}

func kindOf(t btf.Type) (k paramKind, ok bool) {
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Int:
		if t.Size == 0 || t.Size > 8 || t.Size&(t.Size-1) != 0 {
			return k, false
		}
		return paramKind{size: int(t.Size), signed: t.Encoding == btf.Signed, boolean: t.Encoding == btf.Bool}, true
	case *btf.Enum:
		if t.Size == 0 || t.Size > 8 || t.Size&(t.Size-1) != 0 {
			return k, false
		}
		return paramKind{size: int(t.Size), signed: t.Signed, names: t.Values}, true
	case *btf.Array:
		e, ok := btf.UnderlyingType(t.Type).(*btf.Int)
		if !ok || e.Size != 1 || t.Nelems == 0 {
			return k, false
		}
		return paramKind{size: int(t.Nelems), text: true}, true
	}
	return k, false
}

// want says in words what it takes.
func (k paramKind) want() string {
	switch {
	case k.text:
		return fmt.Sprintf("text of up to %d bytes", k.size-1)
	case k.boolean:
		return "true or false"
	case k.names != nil:
		var names []string
		for _, v := range k.names {
			names = append(names, v.Name)
		}
		return strings.Join(names, ", ")
	}
	lo, hi := k.limits()
	return fmt.Sprintf("whole number, %d to %d", lo, hi)
}

func (k paramKind) limits() (lo int64, hi uint64) {
	bits := 8 * k.size
	if k.signed {
		return math.MinInt64 >> (64 - bits), math.MaxInt64 >> (64 - bits)
	}
	return 0, math.MaxUint64 >> (64 - bits)
}

// show returns a value as set takes it.
func (k paramKind) show(b []byte) string {
	if k.text {
		text, _, _ := strings.Cut(string(b), "\x00")
		return fmt.Sprintf("%q", text)
	}
	word := make([]byte, 8)
	copy(word, b)
	n := binary.LittleEndian.Uint64(word)
	for _, v := range k.names {
		if v.Value == n {
			return v.Name
		}
	}
	switch {
	case k.boolean:
		return fmt.Sprint(n != 0)
	case k.signed:
		shift := 64 - 8*k.size
		return fmt.Sprint(int64(n) << shift >> shift)
	}
	return fmt.Sprint(n)
}

// bytes makes what the variable then holds: value is as decoded from YAML or JSON.
func (k paramKind) bytes(value any) ([]byte, error) {
	wrong := fmt.Errorf("%v: want %s", value, k.want())
	if s, ok := value.(string); ok {
		wrong = fmt.Errorf("%q: want %s", s, k.want())
		switch {
		case k.text && len(s) < k.size && !strings.Contains(s, "\x00"):
			b := make([]byte, k.size)
			copy(b, s)
			return b, nil
		case k.names != nil:
			for _, v := range k.names {
				if v.Name == s {
					return binary.LittleEndian.AppendUint64(nil, v.Value)[:k.size], nil
				}
			}
		}
		return nil, wrong
	}
	if b, ok := value.(bool); ok {
		if !k.boolean {
			return nil, wrong
		}
		return []byte{map[bool]byte{true: 1}[b]}, nil
	}
	if k.text || k.boolean || k.names != nil {
		return nil, wrong
	}
	n, negative, ok := wholeNumber(value)
	lo, hi := k.limits()
	if !ok || negative && (!k.signed || int64(n) < lo) || !negative && n > hi {
		return nil, wrong
	}
	return binary.LittleEndian.AppendUint64(nil, n)[:k.size], nil
}

// Parse reads a value from text, as somebody types it, for HandlersConfig.
func (p Parameter) Parse(text string) (any, error) {
	k := p.kind
	var value any = text
	switch {
	case k.text || k.names != nil:
	case k.boolean:
		if b, err := strconv.ParseBool(text); err == nil {
			value = b
		}
	default:
		if n, err := strconv.ParseUint(text, 0, 64); err == nil {
			value = n
		} else if n, err := strconv.ParseInt(text, 0, 64); err == nil {
			value = n
		}
	}
	if _, err := k.bytes(value); err != nil {
		return nil, fmt.Errorf("param %q: %w", p.Name, err)
	}
	return value, nil
}

// wholeNumber returns a number, as two's complement if it is negative.
func wholeNumber(value any) (n uint64, negative, ok bool) {
	switch v := value.(type) {
	case int:
		return uint64(v), v < 0, true
	case int64:
		return uint64(v), v < 0, true
	case uint64:
		return v, false, true
	case float64: // as in JSON
		if v != math.Trunc(v) || math.Abs(v) > 1<<53 {
			return 0, false, false
		}
		return uint64(int64(v)), v < 0, true
	}
	return 0, false, false
}

// setParameters writes values into the specification of a life.
func (o *Object) setParameters(spec *ebpf.CollectionSpec, values map[string]any) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		i := slices.IndexFunc(o.params, func(p Parameter) bool { return p.Name == name })
		if i < 0 {
			there := "there are none"
			var known []string
			for _, p := range o.params {
				known = append(known, fmt.Sprintf("%s (%s)", p.Name, p.Want))
			}
			if known != nil {
				there = "there are " + strings.Join(known, ", ")
			}
			errs = append(errs, &spin.ParamError{Param: name, Err: show(fmt.Errorf("no such parameter: %s", there))})
			continue
		}
		b, err := o.params[i].kind.bytes(values[name])
		if err == nil {
			err = spec.Variables[name].Set(b)
		}
		if err != nil {
			errs = append(errs, &spin.ParamError{Param: name, Err: show(err)})
		}
	}
	return errors.Join(errs...)
}
