// SPDX-License-Identifier: Apache-2.0

package spin_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/xspin/xspin/spin"
)

// Each parameter has a key of its own; what is wrong with several, or with no known one,
// stands above these.
func TestParametersHaveKeys(t *testing.T) {
	end := errors.New("end")
	for _, tc := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{&spin.ParamError{Param: "to", Err: end}, "params.to: end"},
		{errors.Join(&spin.ParamError{Param: "to", Err: end}, end), "params.to: end; params: end"},
		{fmt.Errorf("type %w and count %w", end, end), "params: type end and count end"},
	} {
		var all spin.Problems
		all.AddParams(tc.err)
		if got := all.Error(); got != tc.want {
			t.Errorf("%v: %q, want %q", tc.err, got, tc.want)
		}
		if tc.err != nil && !errors.Is(all.Err(), end) {
			t.Errorf("%v: the cause is lost", tc.err)
		}
	}
	if got := (&spin.ParamError{Param: "type", Line: 2, Column: 9, Err: end}).Error(); got != `param "type":2:9: end` {
		t.Error(got)
	}
}
