// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"errors"
	"fmt"
)

// A ParamError says what is wrong with a parameter of handlers, and where in its text.
type ParamError struct {
	Param        string
	Line, Column int // in the text, from 1; 0: all of it
	Err          error
}

func (e *ParamError) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("param %q: %v", e.Param, e.Err)
	}
	return fmt.Sprintf("param %q:%d:%d: %v", e.Param, e.Line, e.Column, e.Err)
}

func (e *ParamError) Unwrap() error { return e.Err }

// AddParams adds what is wrong with parameters, each at its key below "params".
func (all *Problems) AddParams(err error) {
	for _, err := range Flatten(err) {
		path := "params"
		if wrong := (*ParamError)(nil); errors.As(err, &wrong) {
			path, err = path+"."+wrong.Param, wrong.Err
		}
		all.Add(path, "%w", err)
	}
}

// Flatten returns the errors that errors.Join has joined, or the only one.
func Flatten(err error) []error {
	if err == nil {
		return nil
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		if all := many.Unwrap(); err.Error() == errors.Join(all...).Error() { // else they have words of their own
			return all
		}
	}
	return []error{err}
}
