// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"strings"
	"testing"
	"unicode"

	"github.com/xspin/xspin/loader/objecttest"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/netnstest"
	"github.com/xspin/xspin/spin"
)

// Errors have nothing that a terminal obeys, whatever a file has, and are still the errors that they were.
func TestErrorsCanBeShown(t *testing.T) {
	netnstest.NeedRoot(t)
	const red = "\x1b[31m\u009b31m\xff\u202e"
	bad := around("", "\t__u64 *p = xspin_memory(0, 8);\n\treturn *p; /* "+red+" */")
	messages := object(t, segments+payload+"XSPIN_MESSAGES(PAYLOAD);\n"+licence)
	_, unread := ReadObject(red, []byte("text"), 1<<20)
	_, refused := func() (*Handlers, error) {
		o, err := ReadObject("test"+red, objecttest.Compile(t, bad, "-Wno-error"), 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		return o.Load(HandlersConfig{Format: matcher.FormatByName("packet")})
	}()
	var rejection *Rejection
	if !errors.As(refused, &rejection) || !strings.Contains(rejection.Source, "return *p; /* ?[31m") {
		t.Errorf("%q: %+v", refused, rejection)
	} else {
		for _, text := range append(rejection.Log, rejection.Place, rejection.Error()) {
			if text != shown(text) {
				t.Errorf("the rejection has %q", text)
			}
		}
	}
	if !errors.Is(unread, ErrObject) {
		t.Error(unread)
	}
	unknown := messages.CheckParameters(map[string]any{red: 1, "b": 2})
	var wrong *spin.ParamError
	if all := spin.Flatten(unknown); len(all) != 2 || !errors.As(all[0], &wrong) {
		t.Error(all)
	}
	for what, err := range map[string]error{
		"ReadObject": unread, "Load": refused, "CheckParameters": unknown,
		"CheckFormat": messages.CheckFormat(&matcher.Format{Name: red}),
	} {
		if err == nil || strings.ContainsFunc(err.Error(), func(r rune) bool {
			return !unicode.IsPrint(r) && r != '\n' && r != '\t' || r == unicode.ReplacementChar
		}) {
			t.Errorf("%s: %q", what, err)
		}
	}
	if err := messages.CheckFormat(matcher.FormatByName("slmp")); err != nil {
		t.Error(err)
	}
}
