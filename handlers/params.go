// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"encoding"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/xspin/xspin/spin"
)

// Params are a set's parameters in the configuration: keys and values as decoded from
// YAML or JSON.
type Params map[string]any

// Decode puts the parameters into a struct with fields tagged `param:"name"`, or
// `param:"name,required"`. The field of a parameter that is not given keeps its value,
// which is the default.
//
// Fields may be strings, bools, numbers, durations ("10s"), types with UnmarshalText
// (such as netip.AddrPort), and slices of these. Unknown names, wrong types, numbers out
// of range and missing required parameters are errors; Decode returns all of them. Names
// match without regard to case.
func (p Params) Decode(into any) error {
	v := reflect.ValueOf(into)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("handlers: Decode into %T: want a pointer to a struct", into)
	}
	v = v.Elem()
	left := maps.Clone(p)
	var errs []error
	var known []string
	for i := range v.NumField() {
		name, option, _ := strings.Cut(v.Type().Field(i).Tag.Get("param"), ",")
		if name == "" {
			continue
		}
		field := v.Field(i)
		known = append(known, fmt.Sprintf("%s (%s)", name, want(field)))
		found := 0
		for _, key := range slices.Sorted(maps.Keys(left)) {
			if !strings.EqualFold(key, name) {
				continue
			}
			if found++; found > 1 {
				errs = append(errs, badParam(key, "appears twice"))
			} else if err := set(field, left[key]); err != nil {
				errs = append(errs, badParam(key, "%w", err))
			}
			delete(left, key)
		}
		if found == 0 && option == "required" {
			errs = append(errs, badParam(name, "is missing: want %s", want(field)))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(left)) {
		there := "there are none"
		if len(known) > 0 {
			there = "want " + strings.Join(known, ", ")
		}
		errs = append(errs, badParam(key, "no such parameter: %s", there))
	}
	return errors.Join(errs...)
}

// A ParamError says what is wrong with a parameter, and where in its text. Factories return
// it, or several that are joined, so that the configuration's line can be told.
type ParamError = spin.ParamError

// badParam makes one about all of a parameter.
func badParam(param, format string, args ...any) error {
	return &ParamError{Param: param, Err: fmt.Errorf(format, args...)}
}

var durationType = reflect.TypeFor[time.Duration]()

// unmarshaler returns a field that reads text, or nil.
func unmarshaler(field reflect.Value) encoding.TextUnmarshaler {
	u, _ := field.Addr().Interface().(encoding.TextUnmarshaler)
	return u
}

// want says in words what a field takes.
func want(field reflect.Value) string {
	t := field.Type()
	switch {
	case unmarshaler(field) != nil:
		return "text, " + t.String()
	case t == durationType:
		return `duration, such as "10s"`
	}
	switch k := t.Kind(); k {
	case reflect.Slice:
		return "list of " + want(reflect.New(t.Elem()).Elem())
	case reflect.Int, reflect.Int64:
		return "whole number"
	case reflect.Uint, reflect.Uint64:
		return "whole number, not negative"
	case reflect.Int8, reflect.Int16, reflect.Int32:
		return fmt.Sprintf("whole number, %d to %d", math.MinInt64>>(64-t.Bits()), math.MaxInt64>>(64-t.Bits()))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		return fmt.Sprintf("whole number, 0 to %d", uint64(math.MaxUint64)>>(64-t.Bits()))
	case reflect.Float32, reflect.Float64:
		return "number"
	case reflect.Bool:
		return "true or false"
	default:
		return k.String()
	}
}

// set puts a value from the configuration into a field.
func set(field reflect.Value, value any) error {
	wrong := fmt.Errorf("%s: want %s", show(value), want(field))
	if u := unmarshaler(field); u != nil {
		s, ok := value.(string)
		if !ok {
			return wrong
		}
		if err := u.UnmarshalText([]byte(s)); err != nil {
			return fmt.Errorf("%w: %w", wrong, err)
		}
		return nil
	}
	if field.Type() == durationType {
		s, ok := value.(string)
		if !ok {
			return wrong
		}
		d, err := time.ParseDuration(s)
		if err != nil {
			return wrong
		}
		field.SetInt(int64(d))
		return nil
	}
	from := reflect.ValueOf(value)
	switch field.Kind() {
	case reflect.String:
		if from.Kind() == reflect.String {
			field.SetString(from.String())
			return nil
		}
	case reflect.Bool:
		if from.Kind() == reflect.Bool {
			field.SetBool(from.Bool())
			return nil
		}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if n, ok := integer(from); ok && !field.OverflowInt(n) {
			field.SetInt(n)
			return nil
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if from.CanUint() && !field.OverflowUint(from.Uint()) {
			field.SetUint(from.Uint())
			return nil
		}
		if n, ok := integer(from); ok && n >= 0 && !field.OverflowUint(uint64(n)) {
			field.SetUint(uint64(n))
			return nil
		}
	case reflect.Float32, reflect.Float64:
		if n, ok := integer(from); ok {
			field.SetFloat(float64(n))
			return nil
		}
		if from.CanFloat() && !field.OverflowFloat(from.Float()) {
			field.SetFloat(from.Float())
			return nil
		}
	case reflect.Slice:
		if from.Kind() != reflect.Slice {
			return wrong
		}
		list := reflect.MakeSlice(field.Type(), from.Len(), from.Len())
		for i := range from.Len() {
			if err := set(list.Index(i), from.Index(i).Interface()); err != nil {
				return fmt.Errorf("entry %d: %w", i+1, err)
			}
		}
		field.Set(list)
		return nil
	default:
		return fmt.Errorf("handlers: Decode: fields of type %v are not supported", field.Type())
	}
	return wrong
}

// integer returns the value if it is a whole number, even as a float64, as in JSON.
func integer(v reflect.Value) (int64, bool) {
	switch {
	case v.CanInt():
		return v.Int(), true
	case v.CanUint():
		return int64(v.Uint()), v.Uint() <= math.MaxInt64
	case v.CanFloat():
		f := v.Float()
		return int64(f), f == math.Trunc(f) && math.Abs(f) <= 1<<53
	}
	return 0, false
}

// show returns a value as it looks in the configuration.
func show(v any) string {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	if v == nil {
		return "nothing"
	}
	return fmt.Sprint(v)
}
