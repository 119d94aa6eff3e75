package hostfs

import (
	"testing"

	"github.com/useshards/shard"
)

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		src  string
		kind Kind
		dst  string
		at   Kind
		want Placement
	}{
		{"/a/f", File, "/x/y", Missing, Placement{"/x", "y", false}},
		{"/a/f", File, "/x/y", File, Placement{"/x", "y", false}},
		{"/a/f", File, "/x/y", Dir, Placement{"/x/y", "f", false}},
		{"/a/f", File, "/x/y/", Dir, Placement{"/x/y", "f", false}},
		{"/a/f", File, "/x/y/", Missing, Placement{"/x/y", "f", true}},
		{"/a/d", Dir, "/x/y", Missing, Placement{"/x", "y", false}},
		{"/a/d/", Dir, "/x/y", Missing, Placement{"/x", "y", false}},
		{"/a/d/.", Dir, "/x/y", Missing, Placement{"/x", "y", false}},
		{"/a/d", Dir, "/x/y", Dir, Placement{"/x/y", "d", false}},
		{"/a/d/", Dir, "/x/y", Dir, Placement{"/x/y", "d", false}},
		{"/a/d/.", Dir, "/x/y", Dir, Placement{"/x/y", ".", false}},
		{"/a/d", Dir, "/x/y/", Missing, Placement{"/x/y", "d", true}},
		{"/a/d/.", Dir, "/x/y/", Missing, Placement{"/x/y", ".", true}},
		{".", Dir, "/x", Dir, Placement{"/x", ".", false}},
		{"./", Dir, "/x", Dir, Placement{"/x", ".", false}},
		{"..", Dir, "/x", Dir, Placement{"/x", ".", false}},
		{"d", Dir, ".", Dir, Placement{".", "d", false}},
		{"f", File, "g", Missing, Placement{".", "g", false}},
		{"f", File, "/", Dir, Placement{"/", "f", false}},
		{"/", Dir, "/x", Missing, Placement{"/", "x", false}},
		{"/f", File, "/g", Missing, Placement{"/", "g", false}},
	} {
		got, err := Place(Source{c.src, c.kind}, c.dst, c.at)
		if err != nil || got != c.want {
			t.Errorf("Place(%s, %s): %+v, %v; want %+v", c.src, c.dst, got, err, c.want)
		}
	}
	for _, c := range []struct {
		src  string
		kind Kind
		dst  string
		at   Kind
		code shard.Code
	}{
		{"/a/f", Missing, "/x", Dir, shard.CodeNotFound},
		{"/a/f/", File, "/x", Dir, shard.CodeInvalidRequest},
		{"/a/f/.", File, "/x", Dir, shard.CodeInvalidRequest},
		{"/a/f", File, "/x/", File, shard.CodeInvalidRequest},
		{"/a/d", Dir, "/x", File, shard.CodeInvalidRequest},
		{"/a/d/.", Dir, "/x", File, shard.CodeInvalidRequest},
		{"", Dir, "/x", Dir, shard.CodeInvalidRequest},
		{"/a", Dir, "", Missing, shard.CodeInvalidRequest},
	} {
		if got, err := Place(Source{c.src, c.kind}, c.dst, c.at); shard.CodeOf(err) != c.code {
			t.Errorf("Place(%s, %s): %+v, %v; want %s", c.src, c.dst, got, err, c.code)
		}
	}
}
